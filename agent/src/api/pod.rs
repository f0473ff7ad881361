//! The CNI plugin's requests.
//!
//! A [`Session`] is one connection. Its ADD is open from Allocate until the reply to Activate is
//! written; were the connection to end before that, everything is taken back. All that time the
//! session holds the pod link's lock, so a DEL or a repeated ADD of the same attachment waits,
//! and garbage collection leaves it alone.

use super::{api_error, status::Core};
use crate::{
    endpoint::{EndpointError, EndpointRecord, Guard, attachment, mac_of},
    install::others,
    ipam::LeaseRequest,
};
use sinabro_common::{
    api::{
        ApiError, Attachment, ErrorCode, HostPort, LocalMtuWish, MAX_HOST_PORTS, Mac, Owner,
        PodRef, Request, Response, ServiceTranslation, TcpAcceleration,
    },
    fail_point::fail_point,
    names,
};
use std::{net::IpAddr, sync::Arc, time::Duration};
use tokio::{
    task::spawn_blocking,
    time::{Instant, timeout, timeout_at},
};

/// How long a request waits for another one of the same attachment. Below the plugin's own
/// deadline, so that it hears why.
const TURN: Duration = Duration::from_secs(8);
/// Longest container id or interface name, far above what runtimes use.
const MAX_NAME: usize = 256;
/// Longest of the other texts of a request. They are kept in lease files, whose size is bounded.
const MAX_TEXT: usize = 1024;
/// The type of Istio's plugin, in configurations.
const ISTIO: &str = "istio-cni";
/// Most warnings of a request, more than the plugin has reasons for.
const MAX_WARNINGS: usize = 8;

/// One connection's part in the life of pods.
pub struct Session {
    core: Arc<Core>,
    add: Option<Add>,
}

/// An ADD under way.
struct Add {
    guard: Guard,
    request: LeaseRequest,
    acceleration: Option<TcpAcceleration>,
    service_translation: Option<ServiceTranslation>,
    host_ports: Option<Vec<HostPort>>,
    attachment: Attachment,
    /// Activated; only the reply is not known to be written.
    active: bool,
}

/// What the pod wishes beside addresses.
struct Wishes {
    acceleration: Option<TcpAcceleration>,
    local_mtu: Option<LocalMtuWish>,
    service_translation: Option<ServiceTranslation>,
    host_ports: Option<Vec<HostPort>>,
}

/// What the plugin made.
struct Made {
    ifindex: u32,
    netns_cookie: Option<u64>,
    local_mtu: bool,
}

impl Session {
    pub fn new(core: Arc<Core>) -> Self {
        Self { core, add: None }
    }

    /// Whether an ADD is under way.
    pub fn is_open(&self) -> bool {
        self.add.is_some()
    }

    /// The last reply was written.
    pub fn delivered(&mut self) {
        if self.add.as_ref().is_some_and(|add| add.active) {
            self.add = None;
        }
    }

    /// Carries out one request.
    ///
    /// # Errors
    /// As the reply says it.
    pub async fn handle(&mut self, request: Request) -> Result<Response, ApiError> {
        match request {
            Request::Allocate {
                owner,
                network,
                netns,
                pod,
                addresses,
                mac,
                acceleration,
                local_mtu,
                service_translation,
                host_ports,
                warnings,
            } => {
                let request = LeaseRequest {
                    owner,
                    network,
                    netns,
                    pod,
                    mac,
                    addresses,
                };
                let pod = request.pod.clone();
                let wishes = Wishes {
                    acceleration,
                    local_mtu,
                    service_translation,
                    host_ports,
                };
                let allocated = self.allocate(request, wishes, &warnings).await;
                self.announced(&pod, allocated).map(Response::Attachment)
            }
            Request::Activate {
                owner,
                ifindex,
                netns_cookie,
                local_mtu,
            } => {
                let made = Made {
                    ifindex,
                    netns_cookie,
                    local_mtu,
                };
                let pod = self.add.as_ref().map(|add| add.request.pod.clone());
                let activated = self.activate(owner, made).await;
                let pod = pod.unwrap_or_default();
                self.announced(&pod, activated).map(Response::Attachment)
            }
            Request::Check { owner } => {
                // An ADD or a delete under way is about to change the answer.
                let _turn = self.turn(&owner).await?;
                let record = self.core.endpoints.get(&owner);
                let record = record.ok_or_else(|| {
                    ApiError::new(
                        ErrorCode::NotFound,
                        format!("there is no endpoint of {owner}"),
                    )
                })?;
                Ok(Response::Attachment(
                    record.attachment(self.core.datapath.pods_have_filters()),
                ))
            }
            Request::Release { owner } => self.release(owner).await,
            Request::Gc { network, valid } => {
                let core = self.core.clone();
                let removed = blocking(move || Ok(core.endpoints.retain(&network, &valid))).await?;
                for owner in &removed {
                    tracing::info!("removed {owner}, which the runtime does not know any more");
                }
                Ok(Response::Removed(removed))
            }
            other => self.core.report(other).await,
        }
    }

    /// Has an ADD's failure reported to the cluster.
    fn announced<T>(&self, pod: &PodRef, outcome: Result<T, ApiError>) -> Result<T, ApiError> {
        outcome.inspect_err(|error| self.core.announcer.refused(pod, error))
    }

    async fn allocate(
        &mut self,
        request: LeaseRequest,
        wishes: Wishes,
        warnings: &[String],
    ) -> Result<Attachment, ApiError> {
        if let Some(add) = &self.add {
            return Err(invalid(format!(
                "this connection's ADD is of {}",
                add.request.owner
            )));
        }
        check_owner(&request.owner)?;
        let LeaseRequest {
            network,
            netns,
            pod,
            ..
        } = &request;
        if warnings.len() > MAX_WARNINGS {
            return Err(invalid(format!(
                "the request has {} warnings, more than {MAX_WARNINGS}",
                warnings.len()
            )));
        }
        let texts = [network, netns, &pod.namespace, &pod.name, &pod.uid];
        for text in texts.into_iter().chain(warnings) {
            if text.len() > MAX_TEXT {
                return Err(invalid(format!(
                    "a text of the request is longer than {MAX_TEXT} bytes"
                )));
            }
        }
        let host_ports = wishes.host_ports.as_ref().map_or(0, Vec::len);
        if host_ports > MAX_HOST_PORTS {
            return Err(invalid(format!(
                "the request has {host_ports} host ports, more than {MAX_HOST_PORTS}"
            )));
        }
        if let Some(mac) = request.mac.filter(|mac| !mac.is_usable()) {
            return Err(invalid(format!(
                "MAC address {mac} cannot be an interface's"
            )));
        }
        self.core.programs()?;
        let mtu = self.core.mtu()?;
        let guard = self.turn(&request.owner).await?;
        let addresses = self.lease(&request).await?;
        fail_point("leased");
        for warning in warnings {
            tracing::warn!(pod = %PodName(&request), "{warning}");
            self.core.announcer.passed_over(&request.pod, warning);
        }
        let mac = mac_of(request.mac, &addresses).unwrap_or(Mac(names::HOST_MAC));
        let clsact = self.core.datapath.pods_have_filters();
        let local = self.core.local_mtu(wishes.local_mtu, &addresses);
        let attachment = Attachment {
            local,
            ..attachment(&request.owner, mac, mtu, addresses, clsact)
        };
        let service_translation = self.service_translation(wishes.service_translation).await?;
        self.add = Some(Add {
            guard,
            request,
            acceleration: wishes.acceleration,
            service_translation,
            host_ports: wishes.host_ports,
            attachment: attachment.clone(),
            active: false,
        });
        Ok(attachment)
    }

    /// How what a pod with this wish sends to Services is translated. Where Istio's plugin is chained a pod's traffic may be
    /// led to its proxy at any time, and nothing on the pod says so when it is added.
    async fn service_translation(
        &self,
        wish: Option<ServiceTranslation>,
    ) -> Result<Option<ServiceTranslation>, ApiError> {
        if !matches!(wish, None | Some(ServiceTranslation::Auto)) {
            return Ok(wish);
        }
        let dir = self.core.settings.cni_conf_dir.clone();
        let is_chained = blocking(move || Ok(others::is_chained(&dir, ISTIO))).await?;
        Ok(match is_chained {
            true => Some(ServiceTranslation::Packet),
            false => wish,
        })
    }

    /// Leases the addresses. A full range waits for the deletes under way: their pods are gone
    /// already as far as the runtime knows.
    async fn lease(&self, request: &LeaseRequest) -> Result<Vec<IpAddr>, ApiError> {
        let deadline = Instant::now() + TURN;
        loop {
            let coming = self.core.reaper.under_way();
            let (core, request) = (self.core.clone(), request.clone());
            let leased = blocking(move || {
                let endpoints = &core.endpoints;
                endpoints.drain_delete(&request.owner)?;
                endpoints.check_collision(&request.owner)?;
                Ok(endpoints.ipam.allocate(&request)?)
            });
            match leased.await {
                Err(error) if error.code == ErrorCode::RangeFull && Instant::now() < deadline => {
                    let Some(finished) = coming else {
                        return Err(error);
                    };
                    let _ = timeout_at(deadline, self.core.reaper.progress(finished)).await;
                }
                other => return other,
            }
        }
    }

    async fn activate(&mut self, owner: Owner, made: Made) -> Result<Attachment, ApiError> {
        let Some(add) = self.add.as_mut().filter(|add| add.request.owner == owner) else {
            return Err(invalid(format!(
                "no addresses of {owner} were allocated on this connection"
            )));
        };
        let (request, attachment) = (add.request.clone(), add.attachment.clone());
        let record = EndpointRecord {
            owner: request.owner,
            network: request.network,
            netns: request.netns,
            pod: request.pod,
            link: attachment.link.clone(),
            ifindex: made.ifindex,
            mac: attachment.mac,
            host_mac: attachment.host_mac,
            addresses: attachment.addresses.clone(),
            mtu: attachment.mtu,
            local: attachment.local.clone().filter(|_| made.local_mtu),
            acceleration: add.acceleration,
            host_ports: add.host_ports.clone(),
            service_translation: add.service_translation,
            netns_cookie: made.netns_cookie,
        };
        let core = self.core.clone();
        blocking(move || core.endpoints.activate(record)).await?;
        fail_point("activated");
        add.active = true;
        tracing::info!(pod = %PodName(&add.request), addresses = ?attachment.addresses, link = attachment.link, "pod added");
        Ok(attachment)
    }

    async fn release(&mut self, owner: Owner) -> Result<Response, ApiError> {
        check_owner(&owner)?;
        // On its own connection, a Release is how an ADD is given up.
        let guard = match self.add.take_if(|add| add.request.owner == owner) {
            Some(add) => add.guard,
            None => self.turn(&owner).await?,
        };
        let core = self.core.clone();
        blocking(move || {
            if core.endpoints.begin_release(&owner)? {
                core.reaper.take(guard, owner);
            }
            Ok(())
        })
        .await?;
        Ok(Response::Done)
    }

    /// Waits until no other request of the attachment is under way.
    async fn turn(&self, owner: &Owner) -> Result<Guard, ApiError> {
        let link = owner.link();
        timeout(TURN, self.core.endpoints.locks.lock(&link))
            .await
            .map_err(|_| {
                let text = format!("another request of {owner} is under way, try again later");
                ApiError::new(ErrorCode::NotReady, text)
            })
    }

    /// The connection ended: takes back an ADD that was not finished.
    pub async fn close(mut self) {
        let Some(add) = self.add.take() else {
            return;
        };
        let core = self.core.clone();
        let undo = move || {
            let owner = &add.request.owner;
            // A repeated ADD that never touched the pod's link leaves the pod as it was.
            if !add.active && core.endpoints.is_intact(owner)? {
                return Ok(());
            }
            tracing::info!(pod = %owner, "an ADD was not finished, taking it back");
            core.endpoints.release(owner)?;
            drop(add.guard);
            Ok(())
        };
        if let Err(error) = blocking(undo).await {
            tracing::error!("cannot take back an ADD, garbage collection will: {error}");
        }
    }
}

/// How a pod is called in the log.
struct PodName<'a>(&'a LeaseRequest);

impl std::fmt::Display for PodName<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let LeaseRequest { owner, pod, .. } = self.0;
        match pod.name.as_str() {
            "" => write!(f, "{owner}"),
            name => write!(f, "{}/{name} {owner}", pod.namespace),
        }
    }
}

fn invalid(text: String) -> ApiError {
    ApiError::new(ErrorCode::Invalid, text)
}

fn check_owner(owner: &Owner) -> Result<(), ApiError> {
    let fields = [
        ("container id", &owner.container_id),
        ("interface name", &owner.ifname),
    ];
    for (what, text) in fields {
        if text.is_empty() || text.len() > MAX_NAME || !text.bytes().all(|b| b.is_ascii_graphic()) {
            let rule = format!("1 to {MAX_NAME} printable characters without blanks");
            return Err(invalid(format!("the {what} {text:?} does not have {rule}")));
        }
    }
    Ok(())
}

/// Runs kernel and file work where it may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, EndpointError> + Send + 'static,
) -> Result<T, ApiError> {
    match spawn_blocking(work).await {
        Ok(outcome) => outcome.map_err(|error| api_error(&error)),
        Err(error) => Err(ApiError::new(
            ErrorCode::Internal,
            format!("the request failed: {error}"),
        )),
    }
}
