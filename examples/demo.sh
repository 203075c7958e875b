#!/bin/sh
# Shows on docker-compose.yaml what the bridge does: a new instance is called, one that ends under load costs no call, in Consul and
# in Nacos alike. It ends with status 1 if something that it says is not so.
set -eu
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'demo: %s\n' "$*" >&2; exit 1; }
call() { docker compose run --rm -T --no-deps client "$@"; }

# until_answers HOST INSTANCE... calls until each of the instances has answered.
until_answers() {
  host=$1; shift
  for try in $(seq 60); do
    answers=$(call "$host" 12) || true
    missing=
    for instance; do echo "$answers" | grep -qx "$instance" || missing="$missing $instance"; done
    [ -n "$missing" ] || return 0
    sleep 0.5
  done
  fail "$host: never called:$missing; the last answers were: $answers"
}

# show HOST NEW stops nothing: it counts who answers, ten of them the new one.
show() {
  answers=$(call "$1" 90)
  echo "$answers" | sort | uniq -c
  [ "$(echo "$answers" | grep -cx "$2")" -ge 10 ] || fail "fewer than ten calls reached $2"
}

# stop_under_load HOST INSTANCE stops an instance while it is called.
stop_under_load() {
  answers=$(mktemp)
  call "$1" 250 0.03 > "$answers" &
  load=$!
  for try in $(seq 100); do grep -qx "$2" "$answers" && break; sleep 0.1; done
  docker compose stop "$2"
  wait "$load"
  sort "$answers" | uniq -c
  [ "$(wc -l < "$answers")" -eq 250 ] || fail "250 calls were made, $(wc -l < "$answers") answered"
  grep -qx "$2" "$answers" || fail "$2 was not called before it ended"
  ! grep -q FAILED "$answers" || fail "$(grep -c FAILED "$answers") calls failed"
  [ "$(tail -1 "$answers")" != "$2" ] || fail "$2 still answers"
  rm "$answers"
  echo "250 calls, none failed"
}

consul() { curl -fsS -X PUT "http://127.0.0.1:8500/v1/agent/service/register" -d \
  '{"ID": "'"$1"'", "Name": "web", "Address": "'"$2"'", "Port": 8080, "Meta": {"protocol": "http"},
    "Check": {"TCP": "'"$2"':8080", "Interval": "2s", "Timeout": "1s"}}'; }

nacos() { curl -fsS -o /dev/null "http://127.0.0.1:8848/nacos/v3/admin/ns/instance" -d serviceName=shop -d ip="$1" -d port=8080 \
  -d ephemeral=false --data-urlencode 'metadata={"protocol":"http"}'; }

docker compose up -d --wait

say "Consul has two instances of web"
until_answers web.service.consul web-1 web-2
say "A third one is registered by Consul's API"
consul web-3 172.28.15.23
until_answers web.service.consul web-3
show web.service.consul web-3
say "One of them ends under load"
stop_under_load web.service.consul web-2

say "Nacos gets two instances of shop"
nacos 172.28.15.31
nacos 172.28.15.32
until_answers shop.default-group.public.nacos shop-1 shop-2
say "A third one is registered by Nacos' API"
nacos 172.28.15.33
until_answers shop.default-group.public.nacos shop-3
show shop.default-group.public.nacos shop-3
say "One of them ends under load"
stop_under_load shop.default-group.public.nacos shop-2

say "Done. http://127.0.0.1:15080/ shows what the bridge serves; docker compose down -v ends it all."
