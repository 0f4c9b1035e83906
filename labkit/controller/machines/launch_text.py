"""The commands with which schedulers and people start the agents of an attached pool."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

# Shown where people are about to put ranks on a network.
TRUST = (
    "torch neither authenticates nor encrypts what ranks say to each other (its TCPStore, gloo, NCCL), and its object collectives "
    "unpickle it: whoever can connect to the ranks' ports can stop the job, and can run code in it. Keep these ports, loopback "
    "included, to people you trust."
)


@dataclass(frozen=True)
class Launch:
    """The settings of the command that has to run on each machine.

    Attributes:
        num_nodes: The number of machines.
        workers_per_node: Ranks on each; a scheduler needs to know them for the GPUs and cores.
        connect: ``tcp://host:port`` of the notebook.
        key_file: The key file's path on the machines.
        linger_s: How long ranks wait for a notebook that has fallen silent; None for the default.
        on_gpus: Whether each rank may get a GPU; False if all ranks are to run on the CPU.
    """

    num_nodes: int
    workers_per_node: int
    connect: str
    key_file: str
    linger_s: float | None = None
    on_gpus: bool = True

    def arguments(self) -> list[str]:
        """Return the arguments for Python; they are the same on every machine."""
        linger = [] if self.linger_s is None else ["--linger", f"{self.linger_s:g}"]
        return ["-P", "-m", "labkit.worker", "--connect", self.connect, "--key-file", self.key_file, *linger]

    def command(self) -> str:
        """Return the shell command to run on each machine."""
        return shlex.join(["python", *self.arguments()])

    def writer(self, scheduler: str) -> str:
        """Return the ``labkit launch`` command that writes these settings for a scheduler."""
        words = [
            "labkit",
            "launch",
            scheduler,
            "--num-nodes",
            str(self.num_nodes),
            "--workers-per-node",
            str(self.workers_per_node),
        ]
        words += ["--connect", self.connect, "--key-file", self.key_file]
        words += [] if self.on_gpus else ["--device", "cpu"]
        return shlex.join(words + ([] if self.linger_s is None else ["--linger", f"{self.linger_s:g}"]))

    def slurm(self) -> str:
        """Return a batch script for SLURM: one agent on each machine, which knows its node rank from SLURM_NODEID."""
        gpus = f"#SBATCH --gpus-per-node={self.workers_per_node}\n" if self.on_gpus else ""
        return f"""#!/bin/bash
#SBATCH --job-name=labkit
#SBATCH --nodes={self.num_nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
# Submit with sbatch while the notebook waits in WorkerPool.attach(). The key file must be readable on every machine.
# Without --cpus-per-task srun may leave one core of each machine to all its ranks.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" {self.command()}
"""

    def kubernetes(self, image: str = "YOUR_IMAGE", name: str = "labkit") -> str:
        """Return a manifest for Kubernetes: an indexed job, one pod a machine; JOB_COMPLETION_INDEX gives the node rank."""
        arguments = "".join(f"\n            - {_yaml(item)}" for item in ["python", *self.arguments()])
        per_node = self.workers_per_node
        resources = (
            f"""
            limits:
              nvidia.com/gpu: {per_node}"""
            if self.on_gpus
            else f"""
            requests:
              cpu: {per_node}"""
        )
        return f"""# kubectl create secret generic {name}-key --from-file={self.key_file.rpartition("/")[2]}=labkit.key
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completions: {self.num_nodes}
  parallelism: {self.num_nodes}
  completionMode: Indexed
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      containers:
        - name: ranks
          image: {_yaml(image)}
          command:{arguments}
          resources:{resources}
          volumeMounts:
            - name: key
              mountPath: {_folder(self.key_file)}
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: key
          secret:
            secretName: {name}-key
            defaultMode: 0400
        - name: shm
          emptyDir:
            medium: Memory
"""


def _yaml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _folder(path: str) -> str:
    return path.rpartition("/")[0] or "/"
