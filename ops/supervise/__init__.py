"""Starting, watching, restarting and stopping the processes of a run on this node."""
