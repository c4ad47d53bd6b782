"""Brings a model's files from the Hub before its engine starts: `python -m prefixpool_agent.download`, in its place.

files       which files of a repository an engine needs, and how many of their bytes are there: pure
cache       huggingface_hub's cache on disk, which replicas may share
hub         the Hub itself, by huggingface_hub, which comes with vLLM
pace        whether bytes still come: pure
fetching    tries until all files are there, and tells how far it is
state       how far it is, as a file of the run directory: the agent reads it
__main__    the program; at its end it becomes the engine
"""
