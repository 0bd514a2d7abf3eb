"""The latency gate: did a change make a server slower, in which stage, and could this comparison have told?"""
