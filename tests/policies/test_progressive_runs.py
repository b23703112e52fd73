"""Progressive caches in use: replays after a reset."""

from __future__ import annotations

from caches import progressive
from captured import ImitatedGraphs, Imitation
from models import build
from test_progressive import decode

from hf_sparsekv.policies.token_policy import TokenPolicy


def test_audits_of_steps_captured_before_a_reset(monkeypatch):
    """An allocator may give a later prompt's tensors the memory of an earlier one's: its graph is replayed at once."""
    start, observe, held, made = TokenPolicy.start, TokenPolicy.observe, {}, {}

    def again(policy, store, q_heads):
        start(policy, store, q_heads)
        policy.need.totals = held.setdefault(policy.layer_idx, policy.need.totals)

    def watch(policy, *given, **more):
        observe(policy, *given, **more)
        if policy.labels.channels is not None:
            for name in ("channels", "norms"):
                found = getattr(policy.labels, name)
                setattr(policy.labels, name, made.setdefault((policy.layer_idx, name), found))
                getattr(policy.labels, name).copy_(found)

    class Silent(ImitatedGraphs):
        """Its replays run no code of a layer, as on a GPU."""

        def record(self, run, device, saved):
            graph, output = super().record(run, device, saved)
            replay, policies = graph.replay, [state.layer.policy for state in saved]

            def silently():
                known = [policy.params for policy in policies]
                replay()
                for policy, spec in zip(policies, known):
                    policy.params = spec

            graph.replay = silently
            return graph, output

    monkeypatch.setattr(TokenPolicy, "start", again)
    monkeypatch.setattr(TokenPolicy, "observe", watch)
    net = build("llama", "sparsekv")
    runner = Imitation(net, Silent())
    runner.install()
    cache = progressive(False, audit_every=1)
    decode(cache, net=net)
    captures = runner.captures
    cache.reset()
    decode(cache, net=net)
    assert runner.captures == captures
    assert all(w.audits == 20 * 4 for w in cache.stats().walks)
