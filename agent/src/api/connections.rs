//! What is asked about the connections of this node's pods.

use super::status::Core;
use crate::{
    chain::Chain,
    connections::{ConnectionsError, View},
    datapath::{Datapath, DatapathError, monotonic_ns},
    endpoint::PodNames,
};
use sinabro_common::{
    abi::connection::{ALL_SHARES, Share},
    api::{ApiError, ConnectionStats, ErrorCode, Request, Response, ShareReport, TableReport},
};

/// Answers one of those requests; none if it is another.
pub fn answer(core: &Core, request: &Request) -> Option<Result<Response, ApiError>> {
    let view = |look: &dyn Fn(View<'_>) -> Result<Response, ConnectionsError>| {
        let pods = PodNames::of(&core.endpoints.all());
        let view = View {
            table: core.datapath.connections(),
            pods: &pods,
            now_ns: monotonic_ns(),
        };
        look(view).map_err(|error| refused(&error))
    };
    Some(match request {
        Request::Connections { filter, from } => {
            view(&|view| view.page(filter, *from).map(Response::Connections))
        }
        Request::FlushConnections { filter, all, from } => {
            view(&|view| view.flush(filter, *all, *from).map(Response::Flushed))
        }
        Request::ConnectionStats => view(&|view| {
            let room = Some(core.room());
            let stats = ConnectionStats {
                room,
                ..view.stats()?
            };
            Ok(Response::ConnectionStats(stats))
        }),
        _ => return None,
    })
}

fn refused(error: &ConnectionsError) -> ApiError {
    let code = match error {
        ConnectionsError::NoPod(_) => ErrorCode::NotFound,
        ConnectionsError::Everything => ErrorCode::Invalid,
        ConnectionsError::Datapath(_) => ErrorCode::Internal,
    };
    ApiError::new(code, Chain(error).to_string())
}

/// What a pod's connections take.
pub fn share(share: &Share) -> ShareReport {
    ShareReport {
        connections: share.connections,
        unanswered: share.embryonic,
        refused: share.refused,
    }
}

/// The table at the last sweep, and what was refused until now.
pub fn table(datapath: &Datapath) -> Result<TableReport, DatapathError> {
    let usage = datapath.connection_usage();
    let shares = datapath.connections().shares()?;
    let of_pods = shares.iter().filter(|(payer, _)| *payer != ALL_SHARES);
    let open = usage.connections.saturating_sub(usage.closing);
    Ok(TableReport {
        established: open.saturating_sub(usage.unanswered),
        unanswered: usage.unanswered,
        closing: usage.closing,
        capacity: usage.capacity,
        masqueraded: usage.masqueraded,
        mappings: usage.mappings,
        apart: usage.apart,
        aliases: usage.aliases,
        refused: of_pods.map(|(_, share)| share.refused).sum(),
        sweeps: usage.sweeps,
        sweep_microseconds: usage.sweeping.as_micros() as u64,
    })
}
