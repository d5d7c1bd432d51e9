"""A real SLURM of four virtual nodes on this machine: own configuration, own key, nothing in /etc."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from processes import until

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scontrol", "scancel")
NODES = 4
CPUS = 8
MEGABYTES = 20000
START_SECONDS = 300
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits for the lifetime of a credential before it is started again.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# Without cgroups, this setting kills jobs that exceed their memory.
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
ReturnToService=1
JobRequeue=1
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait={kill_wait}
MinJobAge=300
InactiveLimit=0
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs():
    """Return SLURM's programs that are not installed."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _processes_with(*variables):
    """The folders in /proc of processes that have these variables in their environment."""
    wanted = {each.encode() for each in variables}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted <= set(
                (entry / "environ").read_bytes().split(b"\0")
            ):
                yield entry


def _send(number, processes):
    for each in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)


class Scheduler:
    """SLURM's daemons in their own folder; leaving the context ends them.

    Args:
        folder: folder for configuration, state and logs. Its path must be short: it has munge's socket.
        kill_wait: seconds that processes have between SIGTERM and SIGKILL, for example to save.
    """

    def __init__(self, folder, kill_wait=20):
        self.folder = folder
        self.kill_wait = kill_wait
        # Stored, because a test that runs meanwhile may put its own commands first in $PATH.
        self._path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        self._daemons = {}
        self._frozen = {}

    def __enter__(self):
        try:
            self._configure()
            self._start_munge()
            self._start("slurmctld", "slurmctld", "-D", "-f", str(self.configuration))
            for node in self.nodes:
                self.start_node(node)
            self.wait_for_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in sorted(self._daemons, key=lambda each: each in ("slurmctld", "munged")):
            self._end(name)
        # Processes of a failed test outlive the daemons; their environment names our configuration.
        for entry in _processes_with(f"SLURM_CONF={self.configuration}"):
            with contextlib.suppress(OSError):
                os.kill(int(entry.name), signal.SIGKILL)

    @property
    def configuration(self):
        return self.folder / "slurm.conf"

    @property
    def nodes(self):
        return [f"node{number}" for number in range(1, NODES + 1)]

    @property
    def environment(self):
        """Environment variables for clients."""
        return {"SLURM_CONF": str(self.configuration), "PATH": self._path}

    def start_node(self, node):
        """Start the daemon of a node."""
        self._start(node, "slurmd", "-D", "-f", str(self.configuration), "-N", node)

    def kill_node(self, node, *jobs, number=signal.SIGKILL):
        """Kill the daemon of a node and jobs' processes there: connections are reset; or freeze them."""
        self._daemons[node].send_signal(number)
        if number == signal.SIGKILL:
            self._daemons.pop(node).wait()
        mark = f"SLURM_CONF={self.configuration}"
        tasks = [
            task
            for job in jobs
            for task in _processes_with(mark, f"SLURMD_NODENAME={node}", f"SLURM_JOB_ID={job}")
        ]
        stats = [(task / "stat").read_text().rpartition(")")[2].split() for task in tasks]
        parents = {Path("/proc") / stat[1] for stat in stats}
        # A parent that outlived its task would report the task's end.
        steps = [
            each for each in parents if (each / "cmdline").read_bytes().startswith(b"slurmstepd")
        ]
        killed = [int(each.name) for each in (*steps, *tasks)]
        _send(number, killed)
        self._frozen[node] = killed

    def thaw_node(self, node):
        """Let a frozen node go on."""
        self._daemons[node].send_signal(signal.SIGCONT)
        _send(signal.SIGCONT, self._frozen[node])

    def run(self, *command):
        """Return the output of a client command."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def wait_for_up(self):
        """Wait until all nodes accept jobs."""
        until(
            lambda: self._up() == NODES,
            START_SECONDS,
            f"four nodes that are up; logs in {self.folder}",
        )

    def _up(self):
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            # The state of a node that does not answer ends in a star.
            states = self.run("sinfo", "--noheader", "--Node", "--format=%T").split()
            return sum(state in ("idle", "mixed", "allocated", "completing") for state in states)
        return 0

    def _configure(self):
        host = socket.gethostname()
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir(parents=True)
        ports = [free_port() for _ in self.nodes]
        names = {
            "folder": self.folder,
            "host": host,
            "user": getpass.getuser(),
            "port": free_port(),
            "kill_wait": self.kill_wait,
        }
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={CPUS} RealMemory={MEGABYTES}"
            for node, port in zip(self.nodes, ports, strict=True)
        )
        self.configuration.write_text(CONFIGURATION.format(nodes=nodes, **names))

    def _start_munge(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._start(
            "munged",
            *(
                "munged",
                "--foreground",
                "--force",
                f"--key-file={key}",
                f"--socket={self.folder}/munge.sock",
            ),
            *(f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/log/munge.log"),
            f"--seed-file={self.folder}/munge.seed",
        )
        until((self.folder / "munge.sock").exists, START_SECONDS, "munged")

    def _start(self, name, *command):
        path = shutil.which(command[0], path=self.environment["PATH"])
        assert path is not None, f"{command[0]} is not installed"
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [path, *command[1:]], stdout=log, stderr=log, env={**os.environ, **self.environment}
            )

    def _end(self, name):
        daemon = self._daemons[name]
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGCONT)
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
