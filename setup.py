"""Only what pyproject.toml can't say in a stable way: the copy kernel is optional. Without a compiler NumPy copies."""

from setuptools import Extension, setup

kernel = Extension(
    "pdxfer._native",
    ["pdxfer/_native.c", "pdxfer/_xxh3.c"],
    depends=["pdxfer/_xxh3.h"],
    extra_compile_args=["-O3"],
    optional=True,
)
setup(ext_modules=[kernel])
