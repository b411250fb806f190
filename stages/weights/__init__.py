"""Weight broadcast: from the trainer's files to every engine, checked before anything is touched."""
