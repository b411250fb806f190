"""Losses: pure functions `loss(logp, batch, config) -> (per-token loss, stats)`, and the settings that choose them.

    policy.py       the whole policy loss: proximal policy, filters, method, penalties, statistics
    methods.py      the one place that lists the methods; each has a file of its own (ppo.py, gspo.py, …)
    importance.py   behaviour weights and rejection filters
    proximal.py     log-probs of the proximal policy: recomputed, approximated, reused
    minibatch.py    what needs a whole mini-batch of all ranks: m2po's mask, kl_cov's selection, weight normalisation
    kl.py, critic.py

Knows nothing of models, ranks or messages; a rule over all ranks takes the gathering function as an argument.
"""
