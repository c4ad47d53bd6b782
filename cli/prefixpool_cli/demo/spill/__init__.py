"""The demo of tiers: one workload, four times what a device holds, with and without host memory and disk below it."""
