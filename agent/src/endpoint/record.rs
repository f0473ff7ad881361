//! Endpoint records: one file per pod link, named like it.
//!
//! A record appears whole or not at all. It is written before the
//! programs are attached and removed after they are detached, so whatever is in the data path
//! has a record. A file that is not a record is set aside under another name and reported.

use crate::state_file::{self, FileError, read_small};
use serde::{Deserialize, Serialize};
use sinabro_common::{
    api::{
        Attachment, HostPort, LocalMtu, Mac, Owner, PodRef, PortProtocol, ServiceTranslation,
        TcpAcceleration,
    },
    atomic_file::is_temporary,
    names,
};
use std::{
    fs::{self, DirBuilder},
    io,
    net::IpAddr,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

const SUFFIX: &str = ".json";
/// Added to the name of a file that is not a record.
const BAD_SUFFIX: &str = ".bad";

/// A pod whose interface is set up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointRecord {
    pub owner: Owner,
    /// Name of the network configuration.
    pub network: String,
    /// Path of the pod's network namespace.
    pub netns: String,
    #[serde(default)]
    pub pod: PodRef,
    /// Host-side link.
    pub link: String,
    pub ifindex: u32,
    /// MAC address of the pod's interface.
    pub mac: Mac,
    pub host_mac: Mac,
    /// At most one of each family.
    pub addresses: Vec<IpAddr>,
    /// Of all that the pod sends, but for `local`.
    pub mtu: u32,
    /// What may be larger; none if the pod does not want it, and in what earlier releases wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalMtu>,
    /// What the pod wishes about its TCP connections to pods of this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acceleration: Option<TcpAcceleration>,
    /// The pod's network namespace as programs on sockets see it; none if the kernel has no such
    /// cookies, and in what earlier releases wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns_cookie: Option<u64>,
    /// Ports of the node that another plugin has lead to the pod; not known if the runtime tells nobody of them, and in what earlier
    /// releases wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_ports: Option<Vec<HostPort>>,
    /// How what the pod sends to Services is translated, if that was decided; none in what earlier releases wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_translation: Option<ServiceTranslation>,
}

impl EndpointRecord {
    /// The content of the file of a link.
    ///
    /// # Errors
    /// Why it is not a record of this link.
    pub fn parse(text: &[u8], link: &str) -> Result<Self, String> {
        let record: Self =
            serde_json::from_slice(text).map_err(|error| format!("is not a record: {error}"))?;
        if record.link != link || record.owner.link() != link {
            return Err(format!(
                "is a record of {} on {}",
                record.owner, record.link
            ));
        }
        let families = record.addresses.iter().map(IpAddr::is_ipv4);
        if record.addresses.is_empty()
            || families.clone().filter(|v4| *v4).count() > 1
            || families.filter(|v4| !*v4).count() > 1
        {
            return Err("does not have one address of each family".into());
        }
        Ok(record)
    }

    /// What the plugin gets to know about it.
    pub fn attachment(&self, clsact: bool) -> Attachment {
        let addresses = self.addresses.clone();
        Attachment {
            local: self.local.clone(),
            ..attachment(&self.owner, self.mac, self.mtu, addresses, clsact)
        }
    }

    /// The namespace whose sockets are translated: none if the pod's packets are.
    pub fn translated_netns(&self) -> Option<u64> {
        let by_packets = self.service_translation == Some(ServiceTranslation::Packet);
        self.netns_cookie.filter(|_| !by_packets)
    }

    /// Whether clients get to the pod by a port of the node that is none of TCP's, if that is known.
    pub fn has_datagrams_by_host_port(&self) -> Option<bool> {
        let ports = self.host_ports.as_ref()?;
        Some(ports.iter().any(|port| port.protocol != PortProtocol::Tcp))
    }

    /// MTU of the pod's link.
    pub fn link_mtu(&self) -> u32 {
        self.local.as_ref().map_or(self.mtu, |local| local.mtu)
    }
}

/// Everything the plugin needs for a pod with these addresses and one MTU for everything.
pub fn attachment(
    owner: &Owner,
    mac: Mac,
    mtu: u32,
    addresses: Vec<IpAddr>,
    clsact: bool,
) -> Attachment {
    let gateway = |address: &IpAddr| -> IpAddr {
        match address {
            IpAddr::V4(_) => names::GATEWAY_V4.into(),
            IpAddr::V6(_) => names::GATEWAY_V6.into(),
        }
    };
    Attachment {
        link: owner.link(),
        host_mac: Mac(names::HOST_MAC),
        mac,
        mtu,
        local: None,
        gateways: addresses.iter().map(gateway).collect(),
        addresses,
        clsact,
    }
}

/// A file that was not a record.
#[derive(Debug)]
pub struct BadRecord {
    /// The link that it is named after.
    pub link: String,
    /// What is wrong, with the file's name.
    pub reason: String,
}

/// The directory of records.
#[derive(Debug)]
pub struct Records {
    dir: PathBuf,
}

impl Records {
    /// Makes the directory if it is missing.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn open(state_dir: &Path) -> Result<Self, FileError> {
        let dir = state_dir.join(names::ENDPOINTS_DIR);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(FileError::new("make directory", &dir))?;
        Ok(Self { dir })
    }

    /// Reads all records, and the names of files that are none. Removes temporary files of a
    /// killed agent.
    ///
    /// # Errors
    /// If the directory cannot be listed.
    pub fn load(&self) -> Result<(Vec<EndpointRecord>, Vec<BadRecord>), FileError> {
        let (mut records, mut bad) = (Vec::new(), Vec::new());
        let entries = fs::read_dir(&self.dir).map_err(FileError::new("list", &self.dir))?;
        for entry in entries {
            let entry = entry.map_err(FileError::new("list", &self.dir))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if is_temporary(name.as_ref()) {
                let _ = fs::remove_file(entry.path());
                continue;
            }
            let Some(link) = name.strip_suffix(SUFFIX) else {
                continue;
            };
            match read(&entry.path(), link) {
                Ok(record) => records.push(record),
                Err(reason) => bad.push(BadRecord {
                    link: link.to_owned(),
                    reason: format!("endpoint record {} {reason}", entry.path().display()),
                }),
            }
        }
        Ok((records, bad))
    }

    /// Renames a file that is not a record, so that it is reported once and kept for people.
    ///
    /// # Errors
    /// If it cannot be renamed.
    pub fn set_aside(&self, link: &str) -> Result<(), FileError> {
        let path = self.path(link);
        let mut aside = path.clone().into_os_string();
        aside.push(BAD_SUFFIX);
        fs::rename(&path, aside).map_err(FileError::new("set aside", &path))
    }

    /// # Errors
    /// If the file cannot be written; then an earlier record is still there.
    pub fn write(&self, record: &EndpointRecord) -> Result<(), FileError> {
        let path = self.path(&record.link);
        let text = serde_json::to_vec(record).map_err(io::Error::from);
        state_file::replace(&path, &text.map_err(FileError::new("write", &path))?)
    }

    /// # Errors
    /// If the file cannot be removed; a missing one is no error.
    pub fn remove(&self, link: &str) -> Result<(), FileError> {
        state_file::remove(&self.path(link))
    }

    fn path(&self, link: &str) -> PathBuf {
        self.dir.join(format!("{link}{SUFFIX}"))
    }
}

fn read(path: &Path, link: &str) -> Result<EndpointRecord, String> {
    let text = read_small(path).map_err(|error| format!("cannot be read: {error}"))?;
    EndpointRecord::parse(&text, link)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sinabro_common::api::MAX_HOST_PORTS;

    fn record() -> EndpointRecord {
        let owner = Owner {
            container_id: "c1".into(),
            ifname: "eth0".into(),
        };
        EndpointRecord {
            network: "pods".into(),
            netns: "/run/netns/c1".into(),
            pod: PodRef::default(),
            link: owner.link(),
            owner,
            ifindex: 7,
            mac: Mac([2; 6]),
            host_mac: Mac(names::HOST_MAC),
            addresses: vec!["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()],
            mtu: 1450,
            local: Some(LocalMtu {
                mtu: 65535,
                destinations: vec!["10.0.0.0/24".parse().unwrap()],
            }),
            acceleration: Some(TcpAcceleration::Disabled),
            netns_cookie: Some(u64::MAX),
            host_ports: Some(vec!["tcp/8080".parse().unwrap()]),
            service_translation: Some(ServiceTranslation::Packet),
        }
    }

    #[test]
    fn by_a_host_port_of_tcp_come_no_datagrams() {
        for (ports, expected) in [
            (None, None),
            (Some(vec![]), Some(false)),
            (Some(vec!["tcp/80"]), Some(false)),
            (Some(vec!["tcp/53", "udp/53"]), Some(true)),
            (Some(vec!["sctp/9"]), Some(true)),
        ] {
            let parsed = |ports: Vec<&str>| ports.iter().map(|p| p.parse().unwrap()).collect();
            let record = EndpointRecord {
                host_ports: ports.map(parsed),
                ..record()
            };
            assert_eq!(record.has_datagrams_by_host_port(), expected);
        }
    }

    #[test]
    fn a_record_of_an_earlier_release_is_read_without_what_it_did_not_have() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path()).unwrap();
        let mut earlier = serde_json::to_value(record()).unwrap();
        let fields = earlier.as_object_mut().unwrap();
        let later = [
            "acceleration",
            "netnsCookie",
            "local",
            "hostPorts",
            "serviceTranslation",
        ];
        for field in later {
            assert!(fields.remove(field).is_some());
        }
        fs::write(records.path(&record().link), earlier.to_string()).unwrap();
        let (found, bad) = records.load().unwrap();
        let expected = EndpointRecord {
            acceleration: None,
            netns_cookie: None,
            local: None,
            host_ports: None,
            service_translation: None,
            ..record()
        };
        assert_eq!((found, bad.len()), (vec![expected], 0));
    }

    #[test]
    fn as_many_ports_as_a_pod_may_have_fit() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path()).unwrap();
        let ports = (0..MAX_HOST_PORTS).map(|n| HostPort {
            protocol: PortProtocol::Sctp,
            port: u16::MAX - n as u16,
        });
        let record = EndpointRecord {
            host_ports: Some(ports.collect()),
            ..record()
        };
        records.write(&record).unwrap();
        assert_eq!(records.load().unwrap().0, [record]);
    }

    #[test]
    fn a_record_is_read_back_and_a_killed_write_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path()).unwrap();
        records.write(&record()).unwrap();
        let half = dir.path().join("endpoints/.tmp-x");
        fs::write(&half, "{").unwrap();
        let (found, bad) = records.load().unwrap();
        assert_eq!((found, bad.len()), (vec![record()], 0));
        assert!(!half.exists());
        records.remove(&record().link).unwrap();
        records.remove(&record().link).unwrap();
        assert!(records.load().unwrap().0.is_empty());
    }

    #[test]
    fn a_file_that_is_no_record_is_named_and_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path()).unwrap();
        let path = |link: &str| dir.path().join(format!("endpoints/{link}.json"));
        fs::write(path("snb000000000001"), "{").unwrap();
        fs::write(
            path("snb000000000002"),
            serde_json::to_vec(&record()).unwrap(),
        )
        .unwrap();
        let none = EndpointRecord {
            addresses: Vec::new(),
            ..record()
        };
        fs::write(path(&none.link), serde_json::to_vec(&none).unwrap()).unwrap();
        let (found, bad) = records.load().unwrap();
        assert!(found.is_empty());
        assert_eq!(bad.len(), 3);
        for bad in bad {
            assert!(
                bad.reason.contains(&format!("{}.json", bad.link)),
                "{}",
                bad.reason
            );
            records.set_aside(&bad.link).unwrap();
            assert!(
                dir.path()
                    .join(format!("endpoints/{}.json.bad", bad.link))
                    .exists()
            );
        }
        assert!(records.load().unwrap().1.is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn garbage_and_truncation_never_panic(
            garbage in proptest::collection::vec(any::<u8>(), 0..64),
            cut in 0usize..400,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let records = Records::open(dir.path()).unwrap();
            let whole = serde_json::to_vec(&record()).unwrap();
            for bytes in [&garbage[..], &whole[..cut.min(whole.len() - 1)]] {
                fs::write(records.path(&record().link), bytes).unwrap();
                prop_assert_eq!(records.load().unwrap().1.len(), 1);
            }
        }
    }
}
