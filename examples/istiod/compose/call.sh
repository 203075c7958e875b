# call.sh HOST COUNT [PAUSE] calls a host through Envoy and prints who answered.
for i in $(seq "$2"); do
  timeout 20 wget -q -O - --header "Host: $1" http://envoy:8080/ || echo FAILED
  sleep "${3:-0}"
done
