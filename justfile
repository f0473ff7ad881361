# Every action as one recipe; `cargo xtask --help` knows more.

_default:
    @just --list

# Install what is missing to build and test
setup:
    cargo xtask setup

# Static release binaries in target/dist
build:
    cargo xtask build

# Pods on two nodes, on this machine's own kernel
demo *arguments:
    cargo xtask demo {{arguments}}

# The image, target/dist/sinabro-image.tar
image *arguments:
    cargo xtask image {{arguments}}

# The agent in a kind cluster, which is made if there is none; again after changes
deploy-agent:
    cargo xtask deploy-agent

# Whether the Helm chart says what deploy/sinabro.yaml says
chart:
    cargo xtask chart

# Every test
test *arguments:
    cargo xtask test {{arguments}}

# Inputs that break parsers of what comes from outside
fuzz *arguments:
    cargo xtask fuzz {{arguments}}

# Programs, plugin, agent and checks on other kernels, in virtual machines
vm *arguments:
    cargo xtask vm {{arguments}}

# ADD and DEL beside the plugins ptp and host-local
bench-cni *arguments:
    cargo xtask bench cni {{arguments}}

# A real Kubernetes cluster on this machine, without Docker: just cluster up
cluster *arguments:
    cargo xtask cluster {{arguments}}

# Kubernetes' own network tests and the scenarios, on such a cluster
e2e *arguments:
    cargo xtask e2e {{arguments}}

# The agent in clusters of thousands of nodes
bench-nodes *arguments:
    cargo xtask bench nodes {{arguments}}

# Pods from request to Running, beside the plugin bridge
bench-pods *arguments:
    cargo xtask bench pods {{arguments}}

# What each eBPF program costs for each packet; --against COMMIT
bench-programs *arguments:
    cargo xtask bench programs {{arguments}}

# Services, beside the pods' own addresses and beside kube-proxy
bench-services *arguments:
    cargo xtask bench services {{arguments}}

# TCP between pods of one node, accelerated, beside plain
bench-tcp *arguments:
    cargo xtask bench tcp {{arguments}}

# What Sinabro has left on this machine
residue:
    cargo xtask residue

# Formatting and lints, as CI checks them
lint:
    cargo fmt --all --check
    cargo clippy --workspace --exclude sinabro-ebpf --all-targets -- -D warnings

# Licences, sources and versions of dependencies, without the internet
deny:
    cargo deny --offline check bans licenses sources

# All that CI does
ci:
    .ci/run
