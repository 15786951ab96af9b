#!/bin/sh
# Runs a command with its noise in a log, and one line that says what it does and how long that takes; where it fails,
# the end of the log is shown:
#
#   tools/quietly.sh LOG WORDS COMMAND [ARGUMENT...]
#
# On a terminal the line counts the seconds. The exit status is the command's.

log=$1 words=$2
shift 2
mkdir -p "$(dirname "$log")" || exit 1
begun=$(date +%s)
counter=

took() {
    printf '%d s' $(($(date +%s) - begun))
}

stop_counting() {
    if [ -n "$counter" ]; then
        kill "$counter" 2>/dev/null
        wait "$counter" 2>/dev/null
        counter=
    fi
}

trap stop_counting EXIT
# The command gets an interrupt from the terminal itself.
trap 'stop_counting; echo; exit 130' INT
trap 'stop_counting; exit 143' TERM

if [ -t 1 ]; then
    # Only the line of a shell that still runs: one that was killed outright stops no counter.
    while kill -0 $$ 2>/dev/null; do
        printf '\r%s: %s ' "$words" "$(took)"
        sleep 1
    done &
    counter=$!
else
    echo "$words ..."
fi

printf '\n$ %s\n' "$*" >>"$log"
"$@" >>"$log" 2>&1
status=$?
stop_counting
[ -t 1 ] && printf '\r'
if [ "$status" -ne 0 ]; then
    printf '%s: failed after %s; the end of %s says:\n\n' "$words" "$(took)" "$log"
    tail -n 30 "$log"
    exit "$status"
fi
printf '%s: done in %s\n' "$words" "$(took)"
