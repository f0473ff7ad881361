// What kube-proxy makes of a Service, by its own code: a line for each line of input, both JSON.
//
// Read are objects as the API has them; told is what the rules of its nftables mode would come to, before they are
// rules: who is led where, refused or dropped.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"sort"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/proxy"
)

type question struct {
	Node    string                    `json:"node"`
	Zone    string                    `json:"zone"`
	Service v1.Service                `json:"service"`
	Slices  []discovery.EndpointSlice `json:"slices"`
}

// A port of a Service in one family.
type port struct {
	Family        string   `json:"family"`
	Name          string   `json:"name"`
	Protocol      string   `json:"protocol"`
	ClusterIP     string   `json:"clusterIP"`
	Port          int      `json:"port"`
	NodePort      int      `json:"nodePort"`
	ExternalIPs   []string `json:"externalIPs"`
	LoadBalancers []string `json:"loadBalancers"`
	SourceRanges  []string `json:"sourceRanges"`
	Affinity      int      `json:"affinity"`
	HealthCheck   int      `json:"healthCheck"`
	LocalReady    int      `json:"localReady"`
	// Of clients of the cluster address; of pods and nodes at other addresses; of others there.
	Internal outcome `json:"internal"`
	Cluster  outcome `json:"cluster"`
	External outcome `json:"external"`
}

// "refuse", "drop", or endpoints.
type outcome struct {
	Verdict   string   `json:"verdict,omitempty"`
	Endpoints []string `json:"endpoints,omitempty"`
}

func main() {
	// What it says of objects that it passes over.
	klog.SetLogger(logr.Discard())
	in := bufio.NewReader(os.Stdin)
	out := json.NewEncoder(os.Stdout)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return
		}
		var asked question
		if err := json.Unmarshal(line, &asked); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		if err := out.Encode(answer(&asked)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

func answer(asked *question) []port {
	ports := []port{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		services := proxy.NewServiceChangeTracker(family, nil, nil)
		services.Update(nil, &asked.Service)
		serviceMap := make(proxy.ServicePortMap)
		serviceMap.Update(services)

		endpoints := proxy.NewEndpointsChangeTracker(family, asked.Node, nil, nil)
		for i := range asked.Slices {
			endpoints.EndpointSliceUpdate(&asked.Slices[i], false)
		}
		endpointsMap := make(proxy.EndpointsMap)
		endpointsMap.Update(endpoints)
		name := types.NamespacedName{Namespace: asked.Service.Namespace, Name: asked.Service.Name}
		ready := endpointsMap.LocalReadyEndpoints()[name]

		labels := map[string]string{}
		if asked.Zone != "" {
			labels[v1.LabelTopologyZone] = asked.Zone
		}
		for name, info := range serviceMap {
			all := endpointsMap[name]
			cluster, local, _, hasAny := proxy.CategorizeEndpoints(all, info, asked.Node, labels)
			ports = append(ports, port{
				Family:        string(family),
				Name:          name.Port,
				Protocol:      string(name.Protocol),
				ClusterIP:     info.ClusterIP().String(),
				Port:          info.Port(),
				NodePort:      info.NodePort(),
				ExternalIPs:   strings(info.ExternalIPs()),
				LoadBalancers: strings(info.LoadBalancerVIPs()),
				SourceRanges:  ranges(info.LoadBalancerSourceRanges()),
				Affinity:      info.StickyMaxAgeSeconds(),
				HealthCheck:   info.HealthCheckNodePort(),
				LocalReady:    ready,
				Internal:      led(hasAny, info.InternalPolicyLocal(), cluster, local),
				Cluster:       led(hasAny, false, cluster, local),
				External:      led(hasAny, info.ExternalPolicyLocal(), cluster, local),
			})
		}
	}
	return ports
}

// As the proxier decides: nobody anywhere is refused; somebody, but nobody here, is dropped.
func led(hasAny, isLocal bool, cluster, local []proxy.Endpoint) outcome {
	if !hasAny {
		return outcome{Verdict: "refuse"}
	}
	chosen := cluster
	if isLocal {
		chosen = local
	}
	if len(chosen) == 0 {
		return outcome{Verdict: "drop"}
	}
	names := make([]string, 0, len(chosen))
	for _, endpoint := range chosen {
		names = append(names, endpoint.String())
	}
	sort.Strings(names)
	return outcome{Endpoints: names}
}

func strings(addresses []net.IP) []string {
	texts := []string{}
	for _, address := range addresses {
		texts = append(texts, address.String())
	}
	sort.Strings(texts)
	return texts
}

func ranges(prefixes []*net.IPNet) []string {
	texts := []string{}
	for _, prefix := range prefixes {
		texts = append(texts, prefix.String())
	}
	sort.Strings(texts)
	return texts
}
