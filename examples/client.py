"""Ask a server under `stagetrace run` something, as a caller that traces its own requests.

    python client.py http://127.0.0.1:8000

The trace id printed is the caller's: `stagetrace stages traces.db --request TRACE_ID` shows where the time went.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
with urllib.request.urlopen(f"{url}/v1/models") as response:
    model = json.load(response)["data"][0]["id"]

trace_id, span_id = os.urandom(16).hex(), os.urandom(8).hex()
body = {"model": model, "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}
request = urllib.request.Request(
    f"{url}/v1/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "traceparent": f"00-{trace_id}-{span_id}-01"},
)
with urllib.request.urlopen(request) as response:
    answer = json.load(response)
print(answer["id"], trace_id)
