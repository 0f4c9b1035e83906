"""The commands by which schedulers and people start the agents of an attached pool."""

from __future__ import annotations

import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What has to run on each machine.

    Attributes:
        num_nodes: How many machines.
        workers_per_node: Ranks on each; a scheduler needs to know them for the GPUs and cores.
        connect: ``tcp://host:port`` of the notebook.
        key_file: The key file's path on the machines.
        rdzv_endpoint: ``host:port`` of one of the machines, where torchrun's agents meet.
        linger_s: How long ranks wait for a notebook that has fallen silent; None for the default.
        name: Of this pool among those that meet at the same place.
        on_gpus: Each rank may get a GPU; False where all ranks are to run on the CPU.
    """

    num_nodes: int
    workers_per_node: int
    connect: str
    key_file: str
    rdzv_endpoint: str
    linger_s: float | None = None
    name: str = "labkit"
    on_gpus: bool = True

    def arguments(self, rdzv_endpoint: str | None = None) -> list[str]:
        """Torchrun's arguments; the same on every machine."""
        linger = [] if self.linger_s is None else ["--linger", f"{self.linger_s:g}"]
        return [
            *("--nnodes", str(self.num_nodes), "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", rdzv_endpoint or self.rdzv_endpoint, "--rdzv-id", self.name),
            *("-m", "labkit.worker", "--connect", self.connect, "--key-file", self.key_file, *linger),
        ]

    def torchrun(self) -> str:
        """The command to run on each machine, in a shell."""
        return shlex.join(["torchrun", *self.arguments()])

    def writer(self, scheduler: str) -> str:
        """The command that writes this for a scheduler."""
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
        """A batch script for SLURM: one torchrun on each machine."""
        command = shlex.join(["torchrun", *self.arguments("ENDPOINT")]).replace("ENDPOINT", '"$first":29400')
        gpus = f"#SBATCH --gpus-per-node={self.workers_per_node}\n" if self.on_gpus else ""
        return f"""#!/bin/bash
#SBATCH --job-name=labkit
#SBATCH --nodes={self.num_nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
# Submit with sbatch while the notebook waits in WorkerPool.attach(). The key file must be readable on every machine.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Without --cpus-per-task srun may leave one core of each machine to all its ranks.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" {command}
"""

    def kubernetes(self, image: str = "YOUR_IMAGE", name: str = "labkit") -> str:
        """Manifests for Kubernetes: an indexed job with one pod for each machine, and the service by which the pods meet."""
        arguments = "".join(f"\n            - {_yaml(item)}" for item in ["torchrun", *self.arguments(f"{name}-0.{name}:29400")])
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
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  selector:
    job-name: {name}
---
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
      subdomain: {name}
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
