# Where no registry is reached: a Debian made from its packages, and what keeps the namespaces of a pod.
FROM scratch AS base
ADD debian.tar /

FROM base AS pause
ENTRYPOINT ["sleep", "infinity"]
