#!/bin/bash
#SBATCH --job-name="envbuild-h20-1"
#SBATCH --output="/shared/envbuild-h20-1/slurm.log"
#SBATCH --open-mode="append"
#SBATCH --nodes="1"
#SBATCH --ntasks="1"
#SBATCH --mem="9216M"
#SBATCH --time="30"
#SBATCH --export="HOME,LOGNAME,PATH,USER"
#SBATCH --gres="gpu:h20:2"
#SBATCH --no-requeue
set -u
umask 077
at=/shared/envbuild-h20-1/attempt-"${SLURM_RESTART_COUNT:-0}"
name=envbuild-"$SLURM_JOB_ID"-"${SLURM_RESTART_COUNT:-0}"
payload=/shared/envbuild-h20-1/payload
seconds=0 oom=false engine= image= parts= fabric=
mkdir "$at" || exit 1 # fails if this attempt has already started

finish() { # STAGE EXIT
    {
        printf 'stage=%s\nexit=%s\nseconds=%s\noom=%s\n' "$1" "$2" "$seconds" "$oom"
        printf 'job=%s\nnode=%s\ngpus=%s\n' "$SLURM_JOB_ID" "${SLURMD_NODENAME:-}" "${SLURM_JOB_GPUS:-}"
        printf 'engine=%s\nimage=%s\n' "$(printf %s "$engine" | tr -cd '[:alnum:]._ -' | head -c 80)" "$image"
        printf 'parts=%s\nfabric=%s\n' "$parts" "$fabric"
        printf 'bytes=%s\nsha256=%s\n' "$(wc -c <"$at/stdout")" "$(sha256sum <"$at/stdout" | cut -c1-64)"
    } >"$at/outcome.part"
    sync "$at/stdout" "$at/stderr" "$at/outcome.part"
    mv "$at/outcome.part" "$at/outcome"
    exit 0
}
clock() { # seconds since boot: SECONDS and date jump when the clock is set
    local up
    read -r up _ </proc/uptime
    echo "${up%.*}"
}
guard() { # Slurm does not end the engine's container, so end it when the script ends or the folder is removed
    trap '' TERM
    while kill -0 $$ && [ -e "$payload" ]; do sleep 2; done
    ! kill -TERM $$ || sleep 5
    clean
} >/dev/null 2>&1
stop() {
    trap '' TERM
    clean
    kill 0
    exit 143
}
trap stop TERM
: >"$at/stdout" 2>"$at/stderr"
gpus=()
limit=900

[[ ${SLURM_JOB_GPUS:-} =~ ^[0-9]+(,[0-9]+)*$ ]] || finish gpu 1 # no GPU was assigned
program=srun
command -v "$program" >/dev/null || finish program 127 # not on this node
engine=$("$program" --version)
clean() { :; }
run() {
    timeout --foreground -k 10 "$limit" "$program" --nodes=1 --ntasks=1 --quiet --container-image="$image" \
        --container-readonly --no-container-mount-home --no-container-entrypoint --container-workdir=/tmp \
        python -I -c 'it'"'"'s "$(touch /tmp/odd)" `id` \ #' <"$payload"
}

image='registry.example:5000#team/h20@sha256:2222222222222222222222222222222222222222222222222222222222222222'

set -m # a process group of its own, so that the guard outlives the script
guard &
guard=$!
disown
set +m
begin=$(clock)
{
    {
        run
        echo $? >"$at/exit"
    } 2>&1 1>&3 3>&- | tail -c 65536 >"$at/stderr" 3>&-
} 3>&1 | head -c 67108865 >"$at/stdout" &
wait
seconds=$(($(clock) - begin))
[ ! -e "$at/oom" ] || oom=true
clean
kill -KILL "$guard"
finish run "$(cat "$at/exit")"
