//! What is reported about the TCP acceleration.

use crate::datapath::QueueUsage;
use sinabro_common::{
    abi::acceleration::{AccelerationCounters, Reason, ServerKey, Skip, Traffic},
    api::{
        AcceleratedPodReport, AccelerationCount, AccelerationReport, EndpointReport, MemoryReport,
        MessageCount, ServerReport,
    },
};

/// A pod's counters, without the reasons that did not occur.
pub fn count(counters: &AccelerationCounters, memory: QueueUsage) -> AccelerationCount {
    let passed = Reason::ALL.into_iter().filter_map(|reason| {
        let count = MessageCount {
            messages: *counters.passed_messages.get(reason as usize)?,
            bytes: *counters.passed_bytes.get(reason as usize)?,
        };
        (count.messages > 0).then(|| (reason.name().to_owned(), count))
    });
    let skipped = Skip::ALL.into_iter().filter_map(|skip| {
        let sockets = *counters.skipped.get(skip as usize)?;
        (sockets > 0).then(|| (skip.name().to_owned(), sockets))
    });
    AccelerationCount {
        enrolled: counters.enrolled,
        redirected: MessageCount {
            messages: counters.redirected_messages,
            bytes: counters.redirected_bytes,
        },
        passed: passed.collect(),
        skipped: skipped.collect(),
        memory: self::memory(memory),
    }
}

pub fn memory(usage: QueueUsage) -> MemoryReport {
    MemoryReport {
        used: usage.used,
        limit: usage.limit,
    }
}

/// Everything together; pods that are not accelerated are left out.
pub fn report(
    pods: impl Iterator<Item = EndpointReport>,
    servers: Vec<(ServerKey, Traffic, Option<Skip>)>,
    memory: Option<MemoryReport>,
) -> AccelerationReport {
    let mut servers: Vec<ServerReport> = servers.into_iter().map(server).collect();
    servers.sort_by_key(|server| (server.address, server.port, server.netns));
    AccelerationReport {
        pods: pods
            .filter_map(|pod| {
                Some(AcceleratedPodReport {
                    owner: pod.owner,
                    pod: pod.pod,
                    counters: pod.acceleration?,
                })
            })
            .collect(),
        servers,
        memory,
    }
}

fn server((key, traffic, skip): (ServerKey, Traffic, Option<Skip>)) -> ServerReport {
    ServerReport {
        address: key.addr.into(),
        port: key.port,
        netns: (key.netns != 0).then_some(key.netns),
        verdict: skip.map_or("enrolled", Skip::name).to_owned(),
        connections: traffic.connections,
        messages: traffic.messages,
        bytes: traffic.bytes,
    }
}
