# The course in an image: docker build -t ddpz-lite .
# With GPUs:              docker build -t ddpz-lite --build-arg TORCH=cu128 .
#
# JupyterLab: docker run --rm -p 8888:8888 --shm-size 2g ddpz-lite make lab ARGS="--ip 0.0.0.0 --no-browser"
# Training:   docker run --rm --shm-size 2g ddpz-lite ddpz train --stage 3 --ranks 2

# What the course needs of the system; .devcontainer uses this stage.
FROM python:3.13-bookworm AS system
RUN apt-get update && apt-get install -y --no-install-recommends chromium iproute2 make \
    && rm -rf /var/lib/apt/lists/*

FROM system AS course
ARG TORCH=cpu
WORKDIR /ddpz-lite
COPY . .
RUN python .ci/environment.py --torch=$TORCH --for lab
ENV PATH=/ddpz-lite/.venv/bin:$PATH
CMD ["ddpz", "doctor"]
