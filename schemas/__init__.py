"""What is said: every message of a run, the subjects that carry them, ids, arrays, config.

The loop, in the order of the flow (topic → message):

    run.started           RunStarted            a command took up the run
    run.finished          RunFinished           nothing more can be trained             by sampling
    stream.listed         StreamListed          all rows of one stream
    prompt.published      PromptPublished       a row published into an open stream
    group.issued          GroupIssued           one prompt, n slots                     by sampling
    episode.requested     EpisodeRequested      one slot to be rolled out               by fan-out, arena launch
    episode.launched      EpisodeLaunched       the intent, before the launch           by arena launch
    episode.accepted      EpisodeAccepted       the task id, after it                   by arena launch
    session.opened        SessionOpened         a gateway took the session              by the gateway
    interaction.recorded  InteractionRecorded   one model call                          by the gateway
    session.closed        SessionClosed         how many calls there were               by the gateway
    episode.ended         EpisodeEnded          an attempt ended                        by arena launch
    trajectory.ready      Trajectory            a slot's rows and rewards, or rejected  by reward mapping
    group.closed          GroupClosed           a group is whole, short or dropped      by assembly
    step.assembled        StepAssembled         one manifest: the step's batch          by assembly
    step.trained          StepTrained           the update was made                     by the trainer
    weights.published     WeightsPublished      version v can be loaded                 by weight broadcast
    weights.loaded        WeightsLoaded         an engine serves version v              by engines
    run.control           Control               drain, pause, resume, stop
    fold.tick             Tick                  time, as a message
    run.retain            Retain                the low-water mark
    dead.letter           DeadLetter            a message that a stage gave up
    dead.retry            DeadRetry             it is to be handled again           by a person
    dead.dropped          DeadDropped           it needs nothing more               by a person

Last-value (their own stream, one message a key): FoldCheckpoint, TrainerLease.
This room knows no broker, no stage, no torch.
"""
