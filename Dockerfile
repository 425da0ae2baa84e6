# docker build -t shardzoo:cpu .
# docker build -t shardzoo:cuda --build-arg DEVICE=cuda .
ARG DEVICE=cpu

FROM ubuntu:24.04 AS cpu
ENV TORCH_INDEX=https://download.pytorch.org/whl/cpu EXTRAS=metrics

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
ENV TORCH_INDEX=https://download.pytorch.org/whl/cu130 EXTRAS=metrics,triton

# hadolint ignore=DL3006
FROM ${DEVICE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_CONSTRAINT=/opt/shardzoo/constraints.txt PIP_NO_CACHE_DIR=1 DS_BUILD_OPS=0
WORKDIR /opt/shardzoo
COPY constraints.txt ./
# torch comes first: the build scripts of DeepSpeed and of this package look at it. constraints.txt pins the versions.
# hadolint ignore=DL3013
RUN pip install pip setuptools wheel packaging ninja pybind11 \
    && pip install --extra-index-url "$TORCH_INDEX" torch numpy
COPY . .
# hadolint ignore=DL3013
RUN pip install seqeval --no-build-isolation \
    && pip install --no-build-isolation --editable ".[$EXTRAS]"
# The folder stays the working folder: pretrain.py and finetune.py are in it.
RUN useradd --create-home --uid 10001 shardzoo && chown shardzoo .
USER 10001
CMD ["shardzoo", "--help"]
