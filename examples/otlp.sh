#!/bin/sh
# A server whose requests become traces in a back end: Jaeger, Tempo, an OpenTelemetry collector, ...
#   ENDPOINT=http://127.0.0.1:4318 sh otlp.sh MODEL [more of the server's arguments]
# Port 4318 speaks OTLP over HTTP, 4317 over gRPC; headers and the rest come from OTEL_EXPORTER_OTLP_*.
exec stagetrace run --no-store --otlp "${ENDPOINT:-http://127.0.0.1:4318}" -- \
    python -m vllm.entrypoints.openai.api_server --model "$@"
