#!/bin/bash
#SBATCH --job-name="envbuild-h20-1"
#SBATCH --output="/shared/envbuild-h20-1/slurm.log"
#SBATCH --open-mode="append"
#SBATCH --nodes="4"
#SBATCH --ntasks="4"
#SBATCH --ntasks-per-node="1"
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
limit=900
interface=ib0
count=4
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
part() { # arguments: image, or run HOST:PORT
at="$at/node-$SLURM_NODEID"
name="$name-$SLURM_NODEID"
meeting=${2:-}
SLURM_JOB_GPUS=${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-}}
mkdir -p "$at"
finish() { # STAGE EXIT
    printf '%s %s\n' "$1" "$2" >"$at/ended.part"
    mv "$at/ended.part" "$at/ended"
    exit 0
}
fabric=()
[ ! -d /dev/infiniband ] || fabric=(--device /dev/infiniband --ulimit memlock=-1:-1)
trap stop TERM
: >"$at/stdout" 2>"$at/stderr"
gpus=()
[[ ${SLURM_JOB_GPUS:-} =~ ^[0-9]+(,[0-9]+)*$ ]] || finish gpu 1 # no GPU was assigned
gpus=(--gpus "\"device=$SLURM_JOB_GPUS\"")
program=docker
command -v "$program" >/dev/null || finish program 127 # not on this node
engine="docker $("$program" version --format '{{.Server.Version}}')"
clean() { "$program" rm --force --volumes "$name" >/dev/null 2>&1; }
run() {
    timeout --foreground -k 10 "$limit" "$program" run --name "$name" --label io.envbuild.slurm="$SLURM_JOB_ID" \
        --pull never --interactive --init --read-only --network host ${fabric[@]+"${fabric[@]}"} --env ENVBUILD_NODE="$SLURM_NODEID" \
        --env ENVBUILD_MEETING="$meeting" --env ENVBUILD_INTERFACE="$interface" --cap-drop ALL \
        --security-opt no-new-privileges --memory 8589934592 --memory-swap 8589934592 \
        --shm-size 1073741824 --pids-limit 4096 --tmpfs /tmp:exec,mode=1777,size=2147483648 \
        --log-driver none --user 65534:65534 --workdir /tmp ${gpus[@]+"${gpus[@]}"} --entrypoint python \
        "$image" -I -c 'it'"'"'s "$(touch /tmp/odd)" `id` \ #' <"$payload"
    code=$?
    [ "$("$program" inspect --format '{{.State.OOMKilled}}' "$name" 2>/dev/null)" != true ] || : >"$at/oom"
    return $code
}

if [ "$1" = image ]; then
image=registry.example:5000/team/h20@sha256:2222222222222222222222222222222222222222222222222222222222222222
"$program" image inspect "$image" >/dev/null 2>&1 || "$program" pull --quiet "$image" >/dev/null 2>"$at/stderr" ||
    finish image $?
printf '%s\n' "${SLURMD_NODENAME:-}" >"$at/node"
printf '%s\n' "$engine" >"$at/engine"
printf '%s\n' "$image" >"$at/image"
[ ${#fabric[@]} = 0 ] || : >"$at/fabric"
exit 0
fi
image=$(cat "$at/image")

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

}
case ${1:-} in image | run)
    part "$@"
    exit 0
    ;;
esac

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
each() {
    srun --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --mpi=none --quiet bash /shared/envbuild-h20-1/job.sh "$@"
}
node() { # NUMBER FILE: the first line of a file that node NUMBER wrote
    head -n 1 "$at/node-$1/$2" 2>/dev/null
}
clean() { :; }
trap stop TERM
: >"$at/stdout" 2>"$at/stderr"
gpus=()
address=$(ip -4 -o address show dev "$interface" 2>"$at/stderr" | sed -nE 's/.* inet ([0-9.]+).*/\1/p' | head -n 1)
[ -n "$address" ] || finish network 1
each image &
wait $!
nodes=
for ((number = 0; number < count; number++)); do
    SLURMD_NODENAME=$(node "$number" node)
    if [ -z "$SLURMD_NODENAME" ]; then # this node did not get the image
        SLURMD_NODENAME=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n "$((number + 1))p")
        cat "$at/node-$number/stderr" >"$at/stderr" 2>/dev/null
        read -r stage code <"$at/node-$number/ended" && finish "$stage" "$code"
        exit 1
    fi
    nodes="$nodes${nodes:+,}$SLURMD_NODENAME"
done
SLURMD_NODENAME=$nodes engine=$(node 0 engine) image=$(node 0 image)
begin=$(clock)
each run "$address:$((20000 + SLURM_JOB_ID * 160 % 12000))" & # 160 ports for each job; at most 130 stages need one
wait $!
seconds=$(($(clock) - begin))
worst=0
for ((number = 0; number < count; number++)); do
    read -r stage code <"$at/node-$number/ended" || exit 1 # the node was lost
    [ "$stage" = run ] || finish "$stage" "$code"
    [ ! -e "$at/node-$number/oom" ] || oom=true
    [ "$code" -le "$worst" ] || worst=$code
    parts="$parts${parts:+ }$code:$(wc -c <"$at/node-$number/stdout")"
    fabric="$fabric${fabric:+ }$(if [ -e "$at/node-$number/fabric" ]; then echo yes; else echo no; fi)"
    cat "$at/node-$number/stdout" >>"$at/stdout"
    cat "$at/node-$number/stderr" >>"$at/stderr"
done
finish run "$worst"
