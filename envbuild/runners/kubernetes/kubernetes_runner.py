"""Submits a job to Kubernetes, watches its pod, and reads the pod's log. The job's objects are removed, however the job
ends, unless the state of the job is unknown, or the terminal was closed and the job can be resumed.

If this process is lost, the job can be resumed until the cluster removes the job, an hour after its end.
"""

from __future__ import annotations

import re
import secrets

from envbuild.image.docker_engine import Image
from envbuild.runners import job_resume_tickets
from envbuild.runners.job_resume_tickets import Ticket
from envbuild.runners.kubernetes import job_manifest, pod_job_and_node_states
from envbuild.runners.kubernetes.cluster_api import ApiRefused, Cluster, Silent, uid
from envbuild.runners.kubernetes.job_manifest import Object
from envbuild.runners.kubernetes.kubernetes_settings import KubernetesSite
from envbuild.runners.kubernetes.pod_watch import Attempt
from envbuild.runners.runner_interface import RunnerError, Watch
from envbuild.testrun.run_result import RawOutput
from envbuild.testrun.selftest_job import Job
from envbuild.util.errors import HungUp, Interrupted, NetworkError

_RUNNER = "kubernetes"
# The warning that the nodes do not fetch the image.
ALONE = (
    "warning: no registry is set (imagePullPolicy: Never): only a node that shares this engine has the image; "
    "kubernetes: {registry: HOST/NAME} sets a registry from which other nodes fetch it"
)


class Kubernetes:
    """The runner for Kubernetes. `reference`: the image in a registry, with its digest; None: the nodes already have
    the image. `resume`: the name of the job to resume.

    Raises UsageError if the job to resume is unknown on this machine. `run` raises SettingsError if no cluster is
    configured; `script` needs no cluster.
    """

    max_input: int | None = job_manifest.MAX_PAYLOAD

    def __init__(
        self, site: KubernetesSite, image: Image, reference: str | None, profile: str, resume: str | None = None
    ) -> None:
        self._site = site
        self.image = reference or image.id
        short = re.sub("[^a-z0-9-]", "-", profile.lower())[:30]
        self._ticket = job_resume_tickets.read(_RUNNER, resume) if resume else None
        self.nonce = self._ticket.nonce if self._ticket else None
        self._name = self._ticket.name if self._ticket else f"envbuild-{short}-{secrets.token_hex(6)}"

    def script(self, job: Job, *, brief: bool = False) -> str:
        """The manifests of the job, as YAML. `brief`: without the self-test, which has hundreds of kB in base64."""
        import yaml

        config, work = job_manifest.render(job, self._site, self._name, self.image)
        if brief:
            size = len(config["binaryData"]["payload"])
            config = {**config, "binaryData": {"payload": f"<the self-test, {size} characters: --json shows them>"}}
        # written by libyaml: PyYAML's own writer takes half a second for the self-test
        return str(yaml.dump_all((config, work), Dumper=yaml.CSafeDumper, sort_keys=False))

    def run(self, job: Job, watch: Watch) -> RawOutput:
        """Implements Runner.run. If the terminal is closed, a resumable job continues, and Interrupted is raised with
        the command that resumes it. Other jobs are removed."""
        config, work = job_manifest.render(job, self._site, self._name, self.image)
        if not self._site.registry:
            watch.say(ALONE)
        cluster = Cluster(self._site.context, self._site.namespace)
        if self._ticket:
            self._resumed(self._ticket, cluster, job)
        else:
            self._submit(cluster, job, config, work, watch)
        try:
            if not self._ticket:
                later = f"; if this process is lost: --resume {self._name}" if job.resumable else ""
                watch.say(f"job {cluster.namespace}/{self._name} is submitted{later}")
            output = Attempt(cluster, self._site, self._name, job, work, watch).output()
        except BaseException as error:
            if isinstance(error, HungUp) and job.resumable:
                raise Interrupted(
                    f"the terminal was closed; job {self._name} continues",
                    hint=f"to wait for it: --resume {self._name}",
                ) from None
            if not isinstance(error, pod_job_and_node_states.Unknown):
                self._remove(cluster, watch)
            elif not job.resumable:  # the job may still run; the cluster removes it
                error.hint = "when the server answers again: run the command again"
            raise
        self._remove(cluster, watch)
        return output

    def _submit(self, cluster: Cluster, job: Job, config: Object, work: Object, watch: Watch) -> None:
        """Submits the job. On failure the job is removed, because it could not be resumed without a ticket. If the job
        cannot exist, nothing is removed, and no failure to remove it is reported."""
        try:
            job_resume_tickets.keep(_RUNNER, self._created(cluster, job, config, work))
        except BaseException:
            if cluster.made:
                self._remove(cluster, watch)
            raise

    def _created(self, cluster: Cluster, job: Job, config: Object, work: Object) -> Ticket:
        try:
            made = cluster.create(config, work)
        except Silent as silent:
            raise NetworkError(
                f"the cluster's API server does not answer: {silent}", hint="check it with: kubectl cluster-info"
            ) from silent
        except ApiRefused as refused:
            raise RunnerError(
                f"the cluster refused the job: {refused}", ending="refused", hint="--dry-run shows the job"
            ) from refused
        return job_resume_tickets.made(self._name, self._name, self.image, job, made)

    def _resumed(self, ticket: Ticket, cluster: Cluster, job: Job) -> None:
        """Raises UsageError if the job was submitted with a different input, and RunnerError if the cluster no longer
        has the job or does not show it."""
        job_resume_tickets.require_same(ticket, self.image, job)
        try:
            found = cluster.job(self._name)
        except Silent as silent:
            raise pod_job_and_node_states.Unknown(f"the API server does not answer: {silent}", self._name) from silent
        except ApiRefused as refused:
            raise RunnerError(
                f"the cluster does not show the job: {refused}",
                ending="unknown",
                hint="use the kubectl context and namespace with which the job was submitted",
            ) from refused
        if found is None or uid(found) != ticket.place:
            job_resume_tickets.forget_ticket(_RUNNER, self._name)
            raise RunnerError(
                f"job {cluster.namespace}/{self._name} is lost: the cluster no longer has the job or its output",
                ending="lost",
                hint="the cluster removes a job an hour after its end; run the command again, without --resume",
            )

    def _remove(self, cluster: Cluster, watch: Watch) -> None:
        """Removes the job. If that fails, the cluster removes the remaining objects an hour after the job's end."""
        job_resume_tickets.forget_ticket(_RUNNER, self._name)
        try:
            cluster.remove(self._name)
        except (Silent, ApiRefused) as error:
            watch.say(f"the job could not be removed: {error}; "
                      f"kubectl --namespace {cluster.namespace} delete job,configmap {self._name}")  # fmt: skip
