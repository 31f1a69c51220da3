#!/bin/sh
# How times grow with each size, one sweep after the other: sh benches/scaling.sh FOLDER [SWEEP..]
#
# Writes FOLDER/SWEEP.json and FOLDER/SWEEP.svg. Sweeps: tokens experts top-k hidden ranks shared skew
# layers grow; all of them if none is named. From the environment:
#
#   GRAPH_EP       the program                            (target/release/graph-ep)
#   GRAPH_EP_ARGS  more arguments, as --backend host --samples 3
#   RANKS          ranks of all sweeps but two            (2)
#   MORE_RANKS     what the sweep of ranks goes through   (1,2)
#   TOKENS         the most tokens of the sweep of tokens (65536)
set -eu

folder=${1:?"usage: scaling.sh FOLDER [SWEEP..]"}
shift
program=${GRAPH_EP:-target/release/graph-ep}
ranks=${RANKS:-2}
exchange="--ops dispatch,combine,pair"
mkdir -p "$folder"

# Powers of four up to the most.
tokens=1
most=1
while [ $((most * 4)) -le "${TOKENS:-65536}" ]; do
    most=$((most * 4))
    tokens=$tokens,$most
done

measure() {
    name=$1
    shift
    echo "== $name"
    # shellcheck disable=SC2086 # several arguments in one word
    "$program" bench "$@" ${GRAPH_EP_ARGS:-} --report "$folder/$name.json" > "$folder/$name.txt"
    "$program" bench show "$folder/$name.json" --plot "$folder/$name.svg" ${over:+--over "$over"} \
        > /dev/null
}

for sweep in ${*:-tokens experts top-k hidden ranks shared skew layers grow}; do
    over=$sweep
    case $sweep in
    tokens) measure tokens $exchange --ranks "$ranks" --layout expert,flat --tokens "$tokens" ;;
    experts)
        measure experts $exchange --ranks "$ranks" --tokens 1,128,4096 \
            --experts 8,16,32,64,128,256,512
        ;;
    top-k) measure top-k $exchange --ranks "$ranks" --tokens 1,128,4096 --top-k 1,2,4,8,16 ;;
    hidden)
        measure hidden $exchange --ranks "$ranks" --tokens 1,128,4096 \
            --hidden 1024,2048,4096,8192,16384
        ;;
    ranks)
        measure ranks $exchange --ranks "${MORE_RANKS:-1,2}" --tokens 1,128,4096 \
            --layout expert,flat
        ;;
    shared)
        # All on the first GPU: what each rank more costs, without a wire. A process for each number of
        # them, whose streams have queues of the GPU to themselves.
        for sharing in 2 4 8; do
            over=tokens
            CUDA_VISIBLE_DEVICES=0 measure "shared-$sharing" $exchange --ranks "$sharing" \
                --tokens 1,128 --transfer push --layout expert,flat
        done
        ;;
    skew)
        over=tokens
        measure skew $exchange --ranks "$ranks" --tokens 128,1024,4096 \
            --skew uniform,level,zipf,one-expert,spread-hot,hot-rank,zero-load
        ;;
    layers)
        measure layers --ops replay,recover --ranks "$ranks" --tokens 128 \
            --step-layers 1,2,4,8,16,32,64
        ;;
    grow)
        # One report for each size, for a model of growth.
        for size in 2MiB 32MiB 256MiB 1GiB 4GiB; do
            over=
            measure "grow-$size" --ops grow --ranks "$ranks" --tokens 1 --grow-bytes "$size"
        done
        ;;
    *)
        echo "no sweep is called $sweep" >&2
        exit 2
        ;;
    esac
done
