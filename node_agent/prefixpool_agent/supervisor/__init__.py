"""The supervisor: parent of engine and agent, PID 1 of a worker's container. Standard library only, so that it stays small.

It knows processes, not HTTP: an engine counts as up when its gate has claimed a slot of `gate.state`.
`python -m prefixpool_agent.supervisor <run_dir>/worker.json`
"""
