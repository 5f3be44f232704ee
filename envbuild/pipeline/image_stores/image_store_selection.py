"""Selects what holds the images of a workflow."""

from __future__ import annotations

from envbuild.image.engine_endpoint_and_errors import UnusableEngine
from envbuild.pipeline import runner_selection
from envbuild.pipeline.image_stores.engine_images import EngineImages
from envbuild.pipeline.image_stores.image_store import ImageStore
from envbuild.pipeline.model import RunnerOptions
from envbuild.pipeline.step_context import StepContext
from envbuild.testrun.selftest_job import RunRequest
from envbuild.util.errors import EngineError


def find_image_store(
    context: StepContext, on: RunnerOptions, profile: str, request: RunRequest
) -> ImageStore | EngineError:
    """Return the engine. If no usable engine answers (UnusableEngine) and the self-test runs on a cluster, return the
    cluster's registry. If that is not set either, or after another error, such as an unknown builder, return the
    error.

    Raises what `selected_cluster` raises, if no usable engine answers."""
    try:
        _ = context.engine
    except UnusableEngine as error:
        cluster = runner_selection.selected_cluster(on, profile, request)
        if cluster is None:
            return error
        if cluster.registry is None:
            hint = f"or set the registry of the cluster, which needs no engine: {cluster.name}: {{registry: HOST/NAME}}"
            return UnusableEngine(error.message, hint=f"{error.hint}\n{hint}")
        # loads the audit, which few commands need
        from envbuild.pipeline.image_stores.registry_images import RegistryImages

        context.note(f"{error.message}: the registry {cluster.registry} of {cluster.name} receives the image instead")
        return RegistryImages(context, cluster, cluster.registry)
    except EngineError as error:
        return error
    return EngineImages(context)


def require_image_store(found: ImageStore | EngineError) -> ImageStore:
    """Raise the error of `find_image_store`, if it returned one."""
    if isinstance(found, EngineError):
        raise found
    return found
