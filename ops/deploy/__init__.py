"""Files that run a topology elsewhere: Slurm, systemd, Kubernetes, and the NATS servers under them. Pure: text from a topology."""
