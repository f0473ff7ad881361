//go:build tools

// Package plugins holds the module from which the reference CNI plugins of nodes with a current
// container runtime are built.
package plugins

import (
	_ "github.com/containernetworking/plugins/plugins/main/loopback"
	_ "github.com/containernetworking/plugins/plugins/meta/portmap"
)
