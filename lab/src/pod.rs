//! Pods: a sandbox and what the plugin put into it.

use crate::{
    cni::{Call, IFNAME, config},
    node::{Node, netns_path},
    place::Place,
};
use anyhow::{Context as _, Result, bail, ensure};
use ipnet::IpNet;
use serde_json::Value;
use sinabro_common::api::{EndpointReport, Owner, Request, Response, TcpAcceleration};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A pod that its ADD reported.
#[derive(Clone, Debug)]
pub struct Pod {
    id: String,
    place: Place,
    result: Value,
    v4: Ipv4Addr,
    v6: Ipv6Addr,
}

impl Pod {
    /// The container id.
    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Under which name the agent keeps it.
    pub fn owner(&self) -> Owner {
        Owner {
            container_id: self.id.clone(),
            ifname: IFNAME.into(),
        }
    }

    /// What ADD printed.
    pub fn result(&self) -> &Value {
        &self.result
    }

    pub fn v4(&self) -> IpAddr {
        self.v4.into()
    }

    pub fn v6(&self) -> IpAddr {
        self.v6.into()
    }

    pub fn addresses(&self) -> [IpAddr; 2] {
        [self.v4(), self.v6()]
    }

    /// Reads an ADD's result (CNI 1.1.0, "ADD Success"): one address of each family, each alone
    /// in its prefix.
    fn from_result(id: &str, place: Place, result: Value) -> Result<Self> {
        let mut found = (None, None);
        let ips = result["ips"].as_array().context("no `ips`")?;
        for ip in ips {
            let net: IpNet = ip["address"].as_str().context("no `address`")?.parse()?;
            ensure!(
                net.prefix_len() == net.max_prefix_len(),
                "{net} is not a single address"
            );
            match net.addr() {
                IpAddr::V4(address) => found.0 = Some(address),
                IpAddr::V6(address) => found.1 = Some(address),
            }
        }
        Ok(Self {
            id: id.into(),
            place,
            v4: found.0.context("no IPv4 address")?,
            v6: found.1.context("no IPv6 address")?,
            result,
        })
    }
}

impl Node {
    /// Makes a sandbox and adds it to the network.
    pub fn add_pod(&self, id: &str) -> Result<Pod> {
        self.add_pod_with(id, &[])
    }

    /// The same, with further pairs in CNI_ARGS.
    pub fn add_pod_with(&self, id: &str, args: &[(&str, &str)]) -> Result<Pod> {
        let place = self.make_sandbox(id)?;
        let answer = self.cni_with("ADD", id, args, &config());
        answer
            .and_then(|answer| answer.success())
            .and_then(|result| {
                Pod::from_result(id, place, result.clone())
                    .with_context(|| format!("the plugin's result is wrong: {result}"))
            })
            .with_context(|| format!("cannot add pod {id} on {}", self.name()))
    }

    /// The same, of a pod that wishes its TCP connections accelerated or not.
    pub fn add_pod_wishing(&self, id: &str, wish: TcpAcceleration) -> Result<Pod> {
        self.add_pod_with(id, &[("SINABRO_TCP_ACCELERATION", wish.as_str())])
    }

    /// What the node's agent reports of a pod, if it knows it.
    pub fn endpoint(&self, pod: &Pod) -> Result<Option<EndpointReport>> {
        match self.ask(Request::Endpoints)? {
            Response::Endpoints(endpoints) => {
                let mut endpoints = endpoints.into_iter();
                Ok(endpoints.find(|endpoint| endpoint.owner == pod.owner()))
            }
            other => bail!("unexpected answer {other:?}"),
        }
    }

    /// Adds a sandbox made before; the answer as it came, and the pod if it succeeded.
    pub fn try_add(&self, id: &str, place: &Place) -> Result<(crate::cni::Answer, Option<Pod>)> {
        let answer = self.cni("ADD", id)?;
        let pod = match answer.ok() {
            true => Some(Pod::from_result(id, place.clone(), answer.json.clone())?),
            false => None,
        };
        Ok((answer, pod))
    }

    /// Deletes a pod from the network and then its sandbox.
    pub fn delete_pod(&self, pod: &Pod) -> Result<()> {
        let deleted = self.cni("DEL", &pod.id).and_then(|answer| answer.success());
        deleted.with_context(|| format!("cannot delete pod {} on {}", pod.id, self.name()))?;
        self.remove_sandbox(&pod.id)
    }

    /// CHECK with the result of the pod's ADD.
    pub fn check_pod(&self, pod: &Pod) -> Result<crate::cni::Answer> {
        let mut config = config();
        config["prevResult"] = pod.result.clone();
        self.cni_with("CHECK", &pod.id, &[], &config)
    }

    /// What an ADD that this process made itself gave to a sandbox.
    pub fn pod_of(&self, id: &str, place: &Place, result: &Value) -> Result<Pod> {
        Pod::from_result(id, place.clone(), result.clone())
    }

    /// Calls the plugin with a configuration of the caller's.
    pub fn cni_configured(
        &self,
        command: &str,
        id: &str,
        config: &Value,
    ) -> Result<crate::cni::Answer> {
        self.cni_with(command, id, &[], config)
    }

    /// Calls the plugin for a sandbox with the lab's configuration.
    pub fn cni(&self, command: &str, id: &str) -> Result<crate::cni::Answer> {
        self.cni_with(command, id, &[], &config())
    }

    fn cni_with(
        &self,
        command: &str,
        id: &str,
        more: &[(&str, &str)],
        config: &Value,
    ) -> Result<crate::cni::Answer> {
        let mut args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=lab;K8S_POD_NAME={id};K8S_POD_INFRA_CONTAINER_ID={id}"
        );
        for (name, value) in more {
            args += &format!(";{name}={value}");
        }
        Call {
            plugin: &self.binaries().plugin(),
            command,
            container_id: id,
            netns: Some(&netns_path(id)),
            args: Some(&args),
            config,
        }
        .run(self)
    }
}
