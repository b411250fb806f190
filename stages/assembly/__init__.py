"""Group assembly: from the rows of slots to a step's manifest, in float64 and from ids alone.

    group.issued, trajectory.ready, fold.tick, step.trained ──▶ fold ──▶ group.closed, step.assembled

Membership, advantages, loss weights and mini-batches are decided here, once; ranks and micro-batches are a pure
function of the manifest that every rank runs itself (`partition`). This package never sees a token, a clock or a
broker.
"""
