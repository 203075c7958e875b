// Package wire defines what a bridge and its plugins share besides the messages
// of the contract.
package wire

import (
	"context"
	"errors"
	"time"

	goplugin "github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
)

// ProtocolVersion is the version of the contract. Host and plugin must have the
// same.
const ProtocolVersion = 1

// The cookie shows a plugin that it was started by a host and not by hand. It
// is not secret.
const (
	CookieKey   = "ISTHMUS_ADAPTER"
	CookieValue = "8b1f6a37c2d94e05"
)

// LogLevelKey is the environment variable with the host's minimum log level:
// debug, info, warn or error, in any case.
const LogLevelKey = "ISTHMUS_LOG_LEVEL"

// MetricName is the regular expression that the name of an adapter's own metric
// matches.
const MetricName = `^[a-z][a-z0-9_]{0,63}$`

// Renew is the status of a Watch whose plugin has to be started again although
// nothing is wrong.
const Renew = codes.OutOfRange

// PluginName is the name of the service in go-plugin's table.
const PluginName = "adapter"

const (
	// MaxMessage is the largest message that a host accepts, in bytes.
	MaxMessage = 16 << 20
	// MaxResource is the largest resource that a host accepts, in bytes. Of a
	// larger one the SDK sends the first MaxResource+1: the host rejects it but
	// reads its name, to retain the last good one.
	MaxResource = 1 << 20
	// BatchResources is the number of resources at which the SDK ends a batch.
	BatchResources = 1000
	// BatchBytes is the size at which the SDK ends a batch.
	BatchBytes = 1 << 20
	// Heartbeat is the interval at which an idle SDK sends an empty message.
	Heartbeat = 2 * time.Second
	// HeartbeatLimit is the longest silence that the contract allows a plugin.
	HeartbeatLimit = 5 * time.Second
	// MaxMetrics is the largest number of an adapter's own metrics.
	MaxMetrics = 100
	// HungAfter is the silence after which a host considers a plugin hung.
	HungAfter = 15 * time.Second
)

// Handshake is go-plugin's part of the contract.
var Handshake = goplugin.HandshakeConfig{
	ProtocolVersion:  ProtocolVersion,
	MagicCookieKey:   CookieKey,
	MagicCookieValue: CookieValue,
}

// Adapter connects the contract's service to go-plugin. A plugin sets Service,
// a host leaves it nil.
type Adapter struct {
	goplugin.NetRPCUnsupportedPlugin
	Service pluginv1.AdapterServiceServer
}

var _ goplugin.GRPCPlugin = (*Adapter)(nil)

// GRPCServer registers the service.
func (a *Adapter) GRPCServer(_ *goplugin.GRPCBroker, s *grpc.Server) error {
	if a.Service == nil {
		return errors.New("wire: Adapter.Service is not set")
	}
	pluginv1.RegisterAdapterServiceServer(s, a.Service)
	return nil
}

// GRPCClient returns a pluginv1.AdapterServiceClient.
func (a *Adapter) GRPCClient(_ context.Context, _ *goplugin.GRPCBroker, conn *grpc.ClientConn) (any, error) {
	return pluginv1.NewAdapterServiceClient(conn), nil
}

// Plugins returns the table for go-plugin. A host passes nil.
func Plugins(server pluginv1.AdapterServiceServer) map[int]goplugin.PluginSet {
	return map[int]goplugin.PluginSet{ProtocolVersion: {PluginName: &Adapter{Service: server}}}
}
