# The package as an image, for the CPU:  docker build --tag my_image:1 .
# For NVIDIA GPUs:                       docker build --tag my_image:1 --build-arg VARIANT=cuda .
# For another torch, as `doctor --help` lists them: --build-arg STACK=2.14
# pip and uv look for packages where they always do; name another place by --build-arg PIP_INDEX_URL=...,
# PIP_EXTRA_INDEX_URL=... or PIP_FIND_LINKS=...
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG VARIANT=cpu
ARG STACK
ARG EXTRAS=data,report,retrieval,serve
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 TORCHREC_EXT_VARIANT=${VARIANT}
WORKDIR /src
RUN python3 -m venv /opt/venv
# The pinned triple first: this layer stays as it is until a pin changes. The CUDA build of fbgemm is linked with
# libnvidia-ml.so.1 of NVIDIA's driver, which a container has when it is run on a GPU and not when it is built.
COPY torchrec_ext/__init__.py torchrec_ext/__init__.pyi torchrec_ext/exports.py torchrec_ext/
COPY torchrec_ext/doctor.py torchrec_ext/stack.py torchrec_ext/
RUN if [ "${VARIANT}" = cuda ]; then check=--no-import; fi \
    && /opt/venv/bin/python -m torchrec_ext.doctor --install ${STACK:+--stack "${STACK}"} ${check}
COPY pyproject.toml setup.py README.md LICENSE ./
COPY components components
COPY torchx_apps torchx_apps
COPY torchrec_ext torchrec_ext
RUN /opt/venv/bin/pip install --no-cache-dir ".[${EXTRAS}]"
# The tests and build tools of the packages, which nothing imports; torch_shm_manager is torch's own helper process.
RUN rm -rf /opt/venv/lib/python3*/site-packages/torch/test \
    && find /opt/venv/lib/python3*/site-packages/torch/bin -type f ! -name torch_shm_manager -delete \
    && /opt/venv/bin/pip uninstall --yes pip

FROM ${BASE}
RUN useradd --uid 10001 --user-group --create-home --home-dir /work app
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /work
USER 10001:10001
CMD ["python3", "-m", "torchrec_ext.doctor"]
