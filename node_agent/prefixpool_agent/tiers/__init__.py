"""Tiers below the device: host memory and disk.

Pure or only about files, without torch and vLLM: `connector`, `chunk_file`, `disk_store`, `transfers`, `worth`.
Inside vLLM's processes: `specs`, `host_copy`, `host_stats`, `disk_tier`, `worth_policy`.
"""
