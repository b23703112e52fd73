#!/bin/sh
# Serve the small model, ask it three things at once, show the metrics, and stop. $1: the environment's bin folder;
# what follows goes to `hf-sparsekv serve`.
set -eu
bin=$1
shift
log=$(mktemp)
server=
end() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    rm -rf "$log" "$log".*
}
trap end EXIT INT TERM

echo "$ hf-sparsekv serve small --port 0 $*"
"$bin/hf-sparsekv" serve small --port 0 "$@" 2>"$log" &
server=$!
until grep -q '^listening on ' "$log"; do
    kill -0 "$server" 2>/dev/null || { cat "$log" >&2; server=; exit 1; }
    sleep 0.2
done
grep -v 'Loading weights' "$log" || true
url=$(sed -n 's|^listening on \(http://[^ ]*\)/v1.*|\1|p' "$log")

ask() { # number, question
    body='{"model": "small", "max_tokens": 40, "temperature": 0, "stream": true, "messages": [{"role": "user", "content": "'$2'"}]}'
    curl --silent --no-buffer "$url/v1/chat/completions" -H 'Content-Type: application/json' -d "$body" |
        sed -n 's/.*"delta":{"content":"\(.*\)"},"logprobs".*/\1/p' | tr -d '\n' >"$log.$1"
    printf '\n%s\n    %s\n' "$2" "$(cat "$log.$1")"
}

echo
echo "three questions at once, streamed from $url/v1/chat/completions:"
ask 1 'What is the capital of France?' &
first=$!
ask 2 'Write one sentence about the sea.' &
second=$!
ask 3 'Why is the sky blue? Answer briefly.' &
wait "$first" "$second" "$!"

echo
echo "$ curl $url/metrics"
curl --silent "$url/metrics" | grep -E '^hf_sparsekv_(requests|prompt_tokens|generated_tokens|decode_steps|decode_sec|prefill_sec|time_to_first_token_seconds_(sum|count))'
echo
echo "SIGTERM:"
kill -TERM "$server"
wait "$server" && tail -n 1 "$log"
server=
