"""Run by MLflow's own Python: every trace of an MLflow server, as its client gives them, a span a line."""

import json
import sys

from mlflow import MlflowClient

for trace in MlflowClient(sys.argv[1]).search_traces(locations=["0"], max_results=500):
    for span in trace.data.spans:
        print(json.dumps({**span.to_dict(), "state": str(trace.info.state), "tags": trace.info.tags}))
