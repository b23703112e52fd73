"""What runs in Ray Serve's own processes: the proxies' hints and errors, the router, the autoscaling policy.

These processes have no model. Outside of :mod:`hf_sparsekv`, because importing anything of that imports torch, which
takes longer than Ray waits for a proxy. The deployment itself is :mod:`hf_sparsekv.serving.ray`.
"""
