"""Replicas under Ray Serve: the deployment, and what runs in Ray's own processes.

The proxies' hints and errors, the router and the autoscaling policy run in processes that have no model. They import
neither torch, which takes longer than Ray waits for a proxy, nor :mod:`hf_sparsekv`, which imports torch. The
deployment itself is :mod:`.deployment`.
"""
