//! ADD: lease addresses, make the pair, have the agent put the data path on it.
//!
//! One connection to the agent spans all of it. Whatever fails, [`Undo`] takes back what was
//! done; if the plugin is killed, the agent does, because the connection closes.

use crate::{
    agent_client::{ADD_BUDGET, Agent, AgentError},
    conf::{Conf, Wishes},
    env::{self, Args, Target},
    error::{Code, Error, chain},
    pod_link::{self, Made},
    result::{CniResult, Interface, IpConfig, Route},
    undo::{Step, Undo},
    unsent::Unsent,
};
use nix::sched::{CloneFlags, setns};
use sinabro_common::api::{ApiError, Attachment, ErrorCode, Request, Response};
use sinabro_netlink::{Conn, NetNs, ResultExt, link};
use std::io;

/// Returns the result's JSON.
///
/// # Errors
/// Every code but those of STATUS and CHECK; nothing is left then that was not there before.
pub fn run(conf: &Conf, target: &Target, args: Args) -> Result<String, Error> {
    // Everything that can be wrong with the input, before anything is done.
    let wishes = conf.wishes(&args)?;
    let previous = conf.prev_result()?;
    let dns = conf.dns()?;
    let Inside {
        netns,
        conn: mut pod,
        taken,
        unsent,
    } = open_netns(target)?;
    let mut host = Conn::new().map_err(no_socket)?;
    let mut agent = Agent::connect(&conf.socket, ADD_BUDGET)?;
    if taken {
        refuse_existing(&mut pod, &mut host, &mut agent, target)?;
    }

    let mut undo = Undo::default();
    let request = allocate(conf, target, args, wishes);
    match attach(
        &mut undo, request, target, &netns, &mut pod, &mut host, &mut agent,
    ) {
        Ok((attachment, made)) => {
            if attachment.local.is_some() {
                // Where it cannot be, slow readers cost the node more memory, and nothing else.
                let _ = unsent.and_then(|unsent| unsent.limit());
            }
            let mut result = previous.unwrap_or_default();
            let mut ours = describe(target, &attachment, &made);
            ours.dns = dns;
            result.append(ours);
            result.to_json(conf.version)
        }
        Err(error) => Err(undo.run(error, &mut host, &mut agent)),
    }
}

fn attach(
    undo: &mut Undo,
    request: Request,
    target: &Target,
    netns: &NetNs,
    pod: &mut Conn,
    host: &mut Conn,
    agent: &mut Agent,
) -> Result<(Attachment, Made), Error> {
    let attachment = attachment(agent.call(request)?, agent)?;
    check(&attachment, target).map_err(|why| agent.garbled(why))?;
    undo.begin(Step::Leased(target.owner.clone()));
    undo.begin(Step::Linked(attachment.link.clone()));
    let made = pod_link::make(host, pod, netns, &attachment, &target.owner.ifname)?;
    let activate = Request::Activate {
        owner: target.owner.clone(),
        ifindex: made.host_index,
        // What is done at sockets needs it: a pod is served without, too.
        netns_cookie: pod.netns_cookie().ok().flatten(),
        local_mtu: attachment.local.is_some(),
    };
    self::attachment(agent.call(activate)?, agent)?;
    pod_link::wait_usable(host, made.host_index);
    Ok((attachment, made))
}

/// What was opened of and in a pod's network namespace.
pub struct Inside {
    pub netns: NetNs,
    /// A socket there.
    pub conn: Conn,
    /// Whether the interface's name is taken.
    pub taken: bool,
    pub unsent: io::Result<Unsent>,
}

/// Opens CNI_NETNS and what is needed in it.
///
/// # Errors
/// Code 4 if it is no network namespace, or the plugin's own without leave.
pub fn open_netns(target: &Target) -> Result<Inside, Error> {
    let invalid = |why: &str| env::invalid("CNI_NETNS", &target.netns, why);
    let netns = NetNs::open(&target.netns).map_err(|error| match error {
        sinabro_netlink::Error::NotFound(_) => invalid("which does not exist"),
        sinabro_netlink::Error::Invalid(_) => invalid("which is not a network namespace"),
        other => invalid("which cannot be opened").details(chain(&other)),
    })?;
    let own = NetNs::current().map_err(no_socket)?;
    let same = netns.id().and_then(|id| Ok(id == own.id()?));
    if same.map_err(no_socket)? && !target.netns_override {
        return Err(invalid("the plugin's own namespace")
            .details("CNI_NETNS_OVERRIDE=1 allows that, if it is meant"));
    }
    // There and back on the only thread: one more thread would take longer than all the rest of
    // this. Whoever cannot come back does nothing more.
    let enter = |netns: &NetNs| {
        setns(netns, CloneFlags::CLONE_NEWNET).map_err(|errno| {
            let what = format!("network namespace {} cannot be entered", target.netns);
            Error::new(Code::Kernel, what).details(errno)
        })
    };
    enter(&netns)?;
    let pod = Conn::new().and_then(|conn| Ok((conn, link::is_here(&target.owner.ifname)?)));
    let unsent = Unsent::open();
    enter(&own)?;
    let (conn, taken) = pod.map_err(no_socket)?;
    Ok(Inside {
        netns,
        conn,
        taken,
        unsent,
    })
}

/// An interface that exists is an error (specification, section 2, ADD), unless it is this
/// attachment's own, left by an ADD that was cut short: that goes.
fn refuse_existing(
    pod: &mut Conn,
    host: &mut Conn,
    agent: &mut Agent,
    target: &Target,
) -> Result<(), Error> {
    let refused = |error: sinabro_netlink::Error| {
        Error::new(Code::Kernel, "the pod's interfaces cannot be looked up").details(chain(&error))
    };
    let ifname = &target.owner.ifname;
    let name = target.owner.link();
    // The agent answers once a DEL of this attachment, whose link goes after its reply, is done.
    let owner = target.owner.clone();
    match agent.call(Request::Check { owner }) {
        Err(AgentError::Refused(ApiError {
            code: ErrorCode::NotFound,
            ..
        })) => {}
        Err(other) => return Err(other.into()),
        Ok(_) => return Err(pod_link::exists(ifname)),
    }
    let inner = pod.link_by_name(ifname).ignore_not_found();
    let Some(inner) = inner.map_err(refused)? else {
        return Ok(());
    };
    let outer = host
        .link_by_name(&name)
        .ignore_not_found()
        .map_err(refused)?;
    if outer.is_none_or(|outer| outer.peer != Some(inner.index)) {
        return Err(pod_link::exists(ifname));
    }
    let deleted = host.execute(link::delete_by_name(&name));
    deleted.ignore_not_found().map(drop).map_err(refused)
}

fn allocate(conf: &Conf, target: &Target, args: Args, wishes: Wishes) -> Request {
    Request::Allocate {
        owner: target.owner.clone(),
        network: conf.name.clone(),
        netns: target.netns.clone(),
        pod: args.pod,
        addresses: wishes.addresses,
        mac: wishes.mac,
        acceleration: wishes.acceleration,
        local_mtu: wishes.local_mtu,
        service_translation: wishes.service_translation,
        host_ports: wishes.host_ports,
        warnings: wishes.warnings,
    }
}

fn attachment(response: Response, agent: &Agent) -> Result<Attachment, AgentError> {
    match response {
        Response::Attachment(attachment) => Ok(attachment),
        _ => Err(agent.garbled("not an attachment".into())),
    }
}

/// Whether the agent's attachment is one that can be made, and that DEL would find again.
fn check(attachment: &Attachment, target: &Target) -> Result<(), String> {
    let link = target.owner.link();
    if attachment.link != link {
        return Err(format!("link {} instead of {link}", attachment.link));
    }
    if attachment.addresses.is_empty() {
        return Err("no addresses".into());
    }
    let families = |list: &[std::net::IpAddr]| -> Vec<bool> {
        list.iter().map(std::net::IpAddr::is_ipv4).collect()
    };
    if families(&attachment.addresses) != families(&attachment.gateways) {
        return Err("gateways of other families than the addresses".into());
    }
    Ok(())
}

fn describe(target: &Target, attachment: &Attachment, made: &Made) -> CniResult {
    let (host_mac, mac) = (attachment.host_mac.to_string(), attachment.mac.to_string());
    let mut result = CniResult::default();
    let mtu = pod_link::link_mtu(attachment);
    result.interfaces = vec![
        Interface::new(&attachment.link, host_mac, mtu, None),
        Interface::new(&target.owner.ifname, mac, mtu, Some(&target.netns)),
    ];
    let ips = attachment.addresses.iter().zip(&attachment.gateways);
    result.ips = ips
        .map(|(&address, &gateway)| IpConfig::new(address, gateway, 1))
        .collect();
    let routes = made.routes.iter();
    result.routes = routes
        .filter_map(|route| Some(Route::new(route.dst, route.gateway?, route.mtu)))
        .collect();
    result
}

fn no_socket(error: sinabro_netlink::Error) -> Error {
    Error::new(
        Code::Kernel,
        "the kernel's network configuration cannot be opened",
    )
    .details(chain(&error))
    .also("the plugin has to run as root")
}
