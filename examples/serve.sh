#!/bin/sh
# A server as it was, with `stagetrace run --` before its command.
#   sh serve.sh MODEL [more of the server's arguments]       store: traces.db, or $STORE
# `vllm serve MODEL` works just the same; the module's name also works where vLLM is packaged under another one.
exec stagetrace run --store "${STORE:-traces.db}" -- \
    python -m vllm.entrypoints.openai.api_server --model "$@"
