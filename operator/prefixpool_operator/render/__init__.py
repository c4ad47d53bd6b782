"""Children of a pool as a pure function of (spec, sizing, settings).

blueprint    what is rendered from, and figures that several children share
container    what all containers have in common
volumes      what is mounted where
worker       the container of engine and agent
router       the container of a router
pods         the pod templates around them
workloads    StatefulSet, router Deployment, inspection Job
network      Services, NetworkPolicy, PodDisruptionBudget
access       ServiceAccount, Role, RoleBinding, Secret

An upgrade of the operator must roll nothing: `pinned` keeps the template that a spec was first rendered to.
"""
