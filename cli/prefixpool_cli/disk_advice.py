"""What to do about a disk tier that fails, by what is wrong with it."""

from __future__ import annotations

from typing import Final

from prefixpool.wire import DiskCause

OF: Final = {
    DiskCause.HANGS: "see whether its server and the network answer; a mount that hangs for good is the node's to mend",
    DiskCause.LATE: "the disk is too slow for what is asked of it: use a faster one, or raise --disk-kv-deadline-s",
    DiskCause.FULL: "make room on the file system, or let the tier have less than is there",
    DiskCause.READ_ONLY: "mount it writable; a file system turns read-only after errors, the node's kernel log tells",
    DiskCause.DENIED: "let the engine's user write there (in a pod: the volume's fsGroup)",
    DiskCause.DAMAGED: "something changes files under the engine: look at the disk, and at who else writes there",
    DiskCause.BROKEN: "is the directory still there? engine.log and the node's kernel log have the errors",
}
