# The scheduler: batching and the model. Build from the root, for CPUs or (the second line) for NVIDIA GPUs:
#     docker build --file deploy/docker/scheduler.Dockerfile --tag tercet-scheduler:0.1.0 .
#     docker build ... --build-arg ACCELERATOR=cuda --tag tercet-scheduler:0.1.0-cuda .
ARG ACCELERATOR=cpu

# The compiler builds the C++ kernels. Without it, the package installs and runs on torch alone.
FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python -m venv --without-pip /opt/tercet
COPY constraints.txt ./
COPY packages/protocol packages/protocol
COPY packages/kernels packages/kernels
COPY packages/scheduler packages/scheduler
# The base image's pip installs into the environment. The same pins hold for build dependencies, which -c alone does
# not pin.
ENV PIP_PYTHON=/opt/tercet PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt

# TORCH_INDEX: a package index with torch without CUDA, as PyTorch's installation page has one for CPUs. The image
# works without it, and is then several GB larger. Only torch is taken from this index. The last two lines remove what
# only torch's own tests and builds against torch need: 190 MB.
FROM build AS build-cpu
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir --no-deps -c constraints.txt \
        ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir -c constraints.txt packages/protocol packages/kernels packages/scheduler \
    && rm -rf /opt/tercet/lib/python3*/site-packages/torch/include /opt/tercet/lib/python3*/site-packages/torch/test \
    && find /opt/tercet/lib/python3*/site-packages/torch/bin -type f -not -name torch_shm_manager -delete

FROM build AS build-cuda
RUN pip install --no-cache-dir -c constraints.txt \
    packages/protocol "packages/kernels[cuda]" packages/scheduler

FROM python:3.12-slim-bookworm AS run-cpu

# Triton compiles a small C launcher for every kernel and loads it from its cache folder. The cache must be a volume:
# Docker does not allow code to run from a tmpfs.
FROM python:3.12-slim-bookworm AS run-cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TRITON_CACHE_DIR=/kernels

# hadolint ignore=DL3006
FROM build-${ACCELERATOR} AS built

# hadolint ignore=DL3006
FROM run-${ACCELERATOR}
RUN groupadd --gid 10001 tercet \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp tercet \
    && install --directory --owner=10001 --group=10001 --mode=0700 /keys /models /kernels
COPY --from=built /opt/tercet /opt/tercet
# Models that are given by a name are downloaded into /models.
ENV PATH=/opt/tercet/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models XDG_CACHE_HOME=/models
LABEL org.opencontainers.image.title="tercet-scheduler" org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
WORKDIR /tmp
EXPOSE 30100
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s \
    CMD ["tercet-scheduler", "probe", "--listen", "tcp://127.0.0.1:30100", "--keys", "/keys"]
ENTRYPOINT ["tercet-scheduler"]
CMD ["--listen", "tcp://0.0.0.0:30100", "--keys", "/keys"]
