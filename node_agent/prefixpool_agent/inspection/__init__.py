"""Looks into a model's files, and says in one small document what sizing must know: `python -m prefixpool_agent.inspection`.

folder      a model's own folder
hub         a repository of the Hub: headers are read by ranges, weights are not downloaded
__main__    the program; the operator runs it as a Job, and reads its pod's termination message
"""
