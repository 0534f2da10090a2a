"""JAX's ROCm compiler on a machine without ROCm or an AMD GPU.

JAX's ROCm plugin is a compiler and a runtime in one library, which loads some twenty
ROCm libraries. Ahead-of-time compilation calls none of them, so stub libraries of the
same names replace them; their functions and symbol versions are read from the plugin.
Requires gcc, readelf and nm.
"""

import pathlib
import re
import subprocess
import sys
from collections import defaultdict

import jax

PACKAGES = ("jax-rocm7-plugin", "jax-rocm7-pjrt")
# Libraries of every Linux machine, and symbols provided by them or Python.
_PRESENT = re.compile(
    r"(libm|librt|libpthread|libdl|libstdc\+\+|libc|libgcc_s|ld-linux)\.?"
)
_PRESENT_VERSION = re.compile(r"GLIBC|CXXABI|GCC_|GLIBCXX")
_PRESENT_SYMBOL = re.compile(r"_ZTIS|_ZTIN10__cxx|_ZTVN10__cxx|_Py|Py")
# Return values needed to load the plugin; all other functions return an error.
_ANSWERS = {
    "hipInit": "return 0;",
    "hipGetDeviceCount": "*(int *)a = 0; return 100;",  # no device
    "hipGetErrorString": 'return (long)"no ROCm here";',
    "hipGetErrorName": 'return (long)"none";',
    "hipDriverGetVersion": "*(int *)a = 70200000; return 0;",
    "hipRuntimeGetVersion": "*(int *)a = 70200000; return 0;",
    "__hipRegisterFatBinary": "return (long)&nothing;",
    "hipDeviceGetAttribute": "*(int *)a = 64; return 0;",
}

# XLA's description of an MI300X.
_MI300X = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 64
  shared_memory_per_block: 65536
  shared_memory_per_core: 65536
  threads_per_core_limit: 2048
  core_count: 304
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 5300000000000
  l2_cache_size: 4194304
  clock_rate_ghz: 2.1
  device_memory_size: 206141652992
  shared_memory_per_block_optin: 65536
  rocm_compute_capability { gcn_arch_name: "gfx942:sramecc+:xnack-" }
  registers_per_core_limit: 131072
  registers_per_block_limit: 131072
}
platform_name: "ROCM"
dnn_version_info { major: 3 minor: 5 patch: 0 }
runtime_version { major: 7 minor: 2 patch: 0 }
device_description_str: "AMD Instinct MI300X"
"""


def prepare(folder: pathlib.Path) -> dict[str, str]:
    """Install the plugin and build its stubs, once.

    Args:
      folder: destination; the plugin is a download of 160 MB.

    Returns:
      Environment variables for processes that use `mi300x`.
    """
    site, stand_ins = _site(folder), folder / "lib"
    if not site.exists():
        version = ".".join(map(str, jax.__version_info__))
        packages = [f"{package}=={version}" for package in PACKAGES]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
        subprocess.run(
            [*pip, "--quiet", "--no-deps", "--target", site, *packages], check=True
        )
    if not stand_ins.exists():
        build(site, stand_ins)
    return {"LD_LIBRARY_PATH": str(stand_ins), "JAX_PLATFORMS": "cpu"}


def build(site: pathlib.Path, folder: pathlib.Path) -> None:
    """Build a stub for each missing library of the plugin."""
    libraries = [
        *site.glob("jax_plugins/xla_rocm7/*.so"),
        *site.glob("jax_rocm7_plugin/*.so"),
    ]
    needed, defined = set(), set()
    undefined: list[tuple[str, str, dict[str, str]]] = []
    for library in libraries:
        dynamic = _run("readelf", "-dW", library)
        needed |= set(re.findall(r"NEEDED.*\[(.*?)\]", dynamic))
        versions = _versions(_run("readelf", "-VW", library))
        for line in _run("nm", "-D", "--defined-only", library).splitlines():
            defined.add(line.split()[-1].split("@")[0])
        for line in _run("nm", "-D", "--undefined-only", library).splitlines():
            kind, symbol = line.split()
            if kind == "U":
                name, _, version = symbol.partition("@")
                undefined.append((name, version, versions))
    missing = sorted(name for name in needed if not _PRESENT.match(name))
    # Unversioned symbols do not name a library; any will do.
    anywhere = next(name for name in missing if "rocprofiler" in name)
    symbols: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, version, versions in undefined:
        if name in defined or _PRESENT_SYMBOL.match(name):
            continue
        if not (version and _PRESENT_VERSION.match(version)):
            symbols[versions.get(version, anywhere)][version].add(name)
    folder.mkdir(parents=True)
    for library_name in missing:
        _compile(folder, library_name, symbols[library_name])


def mi300x(folder: pathlib.Path, count: int = 1) -> list[jax.Device]:
    """Return devices to compile for, in a process with `prepare`'s variables."""
    # JAX discovers plugins once, and would warn that this one has no GPU.
    jax.devices("cpu")
    sys.path.append(str(_site(folder)))
    import jax_plugins.xla_rocm7 as plugin
    from jax._src import xla_bridge
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    if not xla_client.pjrt_plugin_loaded("rocm"):
        options = xla_client.generate_pjrt_gpu_plugin_options()
        options["platform_name"] = "ROCM"
        xla_bridge.register_plugin(
            "rocm",
            priority=500,
            library_path=str(plugin._get_library_path()),
            options=options,
        )
    topology = topologies.get_topology_desc(
        "", platform="rocm", topology=f"1x1x{count}", target_config=_MI300X
    )
    return topology.devices  # type: ignore[no-any-return]


def _site(folder: pathlib.Path) -> pathlib.Path:
    return folder / f"site-{jax.__version__}"


def _run(*command: str | pathlib.Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _versions(text: str) -> dict[str, str]:
    """Return the library of each symbol version."""
    found, library = {}, ""
    for line in text.splitlines():
        if match := re.search(r"File: (\S+)", line):
            library = match[1]
        elif (match := re.search(r"Name: (\S+)\s+Flags", line)) and library:
            found[match[1]] = library
    return found


def _compile(folder: pathlib.Path, library: str, symbols: dict[str, set[str]]) -> None:
    """Compile one stub with its versioned symbols."""
    code, versions = ["static long nothing[64];"], []
    for version, names in sorted(symbols.items()):
        for name in sorted(names):
            answer = _ANSWERS.get(name, "return 1;")
            code.append(f"long {name}(void *a, void *b, void *c) {{ {answer} }}")
        if version:
            listed = " ".join(f"{name};" for name in sorted(names))
            versions.append(f"{version} {{ global: {listed} }};")
    source = folder / f"{library}.c"
    source.write_text("\n".join(code) + "\n")
    options: list[str] = []
    if versions:
        script = folder / f"{library}.map"
        script.write_text("\n".join(versions) + "\n")
        options = [f"-Wl,--version-script={script}"]
    _run(
        *("gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library}"),
        *("-o", folder / library, source, *options),
    )
