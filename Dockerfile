# Images of the services, one target each: control (coordinator and command line, no torch), rank-cpu, rank-gpu.

FROM python:3.11-slim AS base
ENV PATH=/opt/kvloom/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOKENIZERS_PARALLELISM=false \
    OPENBLAS_NUM_THREADS=1
# /tmp is the only place a read-only container can write to, so caches that look for a home find one there.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kvloom

FROM base AS wheel
# Where pip looks, for builders that do not use the public index; they reach no final image.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY pyproject.toml README.md ./
COPY cp_layout cp_layout
COPY model_files model_files
COPY cp_wire cp_wire
COPY coordinator coordinator
COPY rank_server rank_server
COPY kv_transfer kv_transfer
COPY cp_client cp_client
COPY benchmarks benchmarks
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# Dependencies first: their layers outlive changes of the sources. The environment itself holds no pip.
FROM base AS control-dependencies
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY pyproject.toml deploy/requirements.py ./
RUN python -m venv --without-pip /opt/kvloom \
    && python requirements.py > control.txt \
    && pip --python /opt/kvloom install --no-cache-dir --requirement control.txt

FROM control-dependencies AS rank-cpu-dependencies
RUN python requirements.py rank > rank-cpu.txt \
    && pip --python /opt/kvloom install --no-cache-dir --requirement rank-cpu.txt

FROM control-dependencies AS rank-gpu-dependencies
RUN python requirements.py rank gpu > rank-gpu.txt \
    && pip --python /opt/kvloom install --no-cache-dir --requirement rank-gpu.txt

FROM control-dependencies AS control-environment
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/kvloom install --no-cache-dir --no-index --no-deps /wheels/*.whl

FROM rank-cpu-dependencies AS rank-cpu-environment
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/kvloom install --no-cache-dir --no-index --no-deps /wheels/*.whl

FROM rank-gpu-dependencies AS rank-gpu-environment
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/kvloom install --no-cache-dir --no-index --no-deps /wheels/*.whl

FROM base AS control
COPY --from=control-environment /opt/kvloom /opt/kvloom
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051
# Healthy = listening, which is what ranks wait for. It serves only once they have come.
HEALTHCHECK --interval=5s --timeout=10s --start-period=120s --retries=3 \
    CMD ["python", "-m", "cp_wire.healthcheck", "--listening", "127.0.0.1:50051"]
CMD ["python", "-m", "coordinator", "--help"]

FROM base AS rank-cpu
COPY --from=rank-cpu-environment /opt/kvloom /opt/kvloom
USER 10001:10001
WORKDIR /tmp
EXPOSE 50052
# A rank listens on the one address it is told, which others must reach: the container's name, never a wildcard.
HEALTHCHECK --interval=5s --timeout=10s --start-period=120s --retries=3 \
    CMD python -m cp_wire.healthcheck "$(hostname):50052"
CMD ["python", "-m", "rank_server", "--help"]

FROM base AS rank-gpu
# Not a left-over of the build: triton compiles the host side of each kernel when it is first used.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=rank-gpu-environment /opt/kvloom /opt/kvloom
USER 10001:10001
WORKDIR /tmp
EXPOSE 50052
HEALTHCHECK --interval=5s --timeout=10s --start-period=120s --retries=3 \
    CMD python -m cp_wire.healthcheck "$(hostname):50052"
CMD ["python", "-m", "rank_server", "--help"]
