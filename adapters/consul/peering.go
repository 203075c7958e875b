package consul

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	consulv1 "github.com/isthmus-mesh/isthmus/adapters/consul/proto/isthmus/consul/v1"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Names of the methods and resources of Consul's peering.
const (
	methodExchange = "/hashicorp.consul.internal.peerstream.PeerStreamService/ExchangeSecret"
	methodStream   = "/hashicorp.consul.internal.peerstream.PeerStreamService/StreamResources"

	urlServices = "type.googleapis.com/hashicorp.consul.internal.peerstream.ExportedServiceList"
	urlService  = "type.googleapis.com/hashicorp.consul.internal.peerstream.ExportedService"
	urlServers  = "type.googleapis.com/hashicorp.consul.internal.peering.PeeringServerAddresses"
)

const (
	// heartbeatEvery is the interval of heartbeats. Consul ends a stream that
	// is silent for two minutes.
	heartbeatEvery = 15 * time.Second
	// silentMost is how long Consul may be silent; it sends heartbeats at the
	// same interval.
	silentMost = time.Minute
	// openMost bounds the opening of a stream.
	openMost = 15 * time.Second
	// Keys in the state: of the peering, and of what is retained.
	peeringPart = "peering"
	heldPart    = "peering grace"
)

// peeringToken is the output of consul peering generate-token, in base64.
type peeringToken struct {
	CA                    []string // PEM
	ManualServerAddresses []string // host:port, given by the operator
	ServerAddresses       []string // host:port, as discovered by Consul
	ServerName            string   // in the servers' certificates
	PeerID                string
	EstablishmentSecret   string // valid for one exchange
}

// parsePeeringToken parses a token and its certificate authorities.
func parsePeeringToken(text []byte) (t peeringToken, roots *x509.CertPool, err error) {
	const cure = "; put the output of consul peering generate-token there"
	raw, err := base64.StdEncoding.DecodeString(string(bytes.TrimSpace(text)))
	if err != nil || json.Unmarshal(raw, &t) != nil {
		return t, nil, errors.New("it holds no peering token" + cure)
	}
	roots = x509.NewCertPool()
	for _, pem := range t.CA {
		if !roots.AppendCertsFromPEM([]byte(pem)) {
			return t, nil, errors.New("the peering token holds an authority that is no PEM certificate" + cure)
		}
	}
	if t.PeerID == "" || t.EstablishmentSecret == "" || t.ServerName == "" || len(t.CA) == 0 || len(t.ManualServerAddresses)+len(t.ServerAddresses) == 0 {
		return t, nil, errors.New("the peering token is incomplete" + cure)
	}
	return t, roots, nil
}

// digest identifies the token without revealing it.
func (t peeringToken) digest() string {
	sum := sha256.Sum256([]byte(t.PeerID + t.EstablishmentSecret))
	return hex.EncodeToString(sum[:])
}

// peeringSecret is the content of the secret file.
type peeringSecret struct {
	Token     string   `json:"token"`               // digest of the token that was exchanged for it
	Secret    string   `json:"secret"`              // opens streams
	Addresses []string `json:"addresses,omitempty"` // host:port of the servers, as last reported
}

// check checks the files at the start. It returns *plugin.FieldError.
func (c PeeringConfig) check() error {
	if _, _, err := c.token(); err != nil {
		return &plugin.FieldError{Field: "peering.token_file", Reason: err.Error()}
	}
	if dir, err := os.Stat(filepath.Dir(c.SecretFile)); err != nil || !dir.IsDir() {
		return &plugin.FieldError{Field: "peering.secret_file", Reason: fmt.Sprintf("there is no folder %s", filepath.Dir(c.SecretFile))}
	}
	return nil
}

func (c PeeringConfig) token() (peeringToken, *x509.CertPool, error) {
	text, err := os.ReadFile(c.TokenFile)
	if err != nil {
		return peeringToken{}, nil, err
	}
	t, roots, err := parsePeeringToken(text)
	if err != nil {
		err = fmt.Errorf("%s: %w", c.TokenFile, err)
	}
	return t, roots, err
}

// secret returns the stored secret for the token, the zero value for none.
func (c PeeringConfig) secret(t peeringToken) (s peeringSecret, err error) {
	text, err := os.ReadFile(c.SecretFile)
	if errors.Is(err, os.ErrNotExist) {
		return s, nil
	}
	if err == nil && json.Unmarshal(text, &s) != nil {
		err = fmt.Errorf("%s is not what the adapter wrote; remove it, and give the registry a new peering token", c.SecretFile)
	}
	if s.Token != t.digest() {
		s = peeringSecret{}
	}
	return s, err
}

// keep replaces the secret file atomically.
func (c PeeringConfig) keep(s peeringSecret) error {
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return c.write(text, true)
}

// write writes a temporary file and renames it to the secret file, or only
// tests whether it could.
func (c PeeringConfig) write(text []byte, replace bool) error {
	f, err := os.CreateTemp(filepath.Dir(c.SecretFile), ".peering-*") // readable by its owner only
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) //nolint:errcheck // it is gone once renamed
	_, err = f.Write(text)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil || !replace {
		return err
	}
	return os.Rename(f.Name(), c.SecretFile)
}

// unwritable is the fault of a secret file that cannot be written.
func unwritable(err error) *fault {
	return &fault{kind: faultDenied, err: fmt.Errorf("peering.secret_file: %w; its folder must be writable for this process", err)}
}

// peer follows the services that a Consul cluster exports to it: one stream
// carries each changed service in full. One goroutine owns it.
type peer struct {
	config  Config
	log     *slog.Logger
	convert converter
	state   *state
	catalog plugin.Catalog
	wants   func(registry.Key) bool
	arrived func() // must be called with each complete listing

	grace *plugin.Grace

	turn  int // number of changes of server
	begun bool
	// services are the exported services, each with whether the stream has sent
	// it; nil before the first list.
	services map[string]bool
	awaited  int // number of those that the stream has not sent
}

func newPeer(a *Adapter, st *state, catalog plugin.Catalog) *peer {
	p := &peer{config: a.config, log: a.env.Log, convert: a.convert, state: st, catalog: catalog, wants: a.env.Wants, arrived: st.listing.Expect()}
	p.grace = plugin.NewGrace(catalog, time.Duration(p.config.RemoveGrace), func(err error) { st.faults.Set(heldPart, faultHeld, err) })
	return p
}

// errNotLeader reports a server that is not the leader.
var errNotLeader = errors.New("the server does not lead")

// run follows the exported services until ctx ends.
func (p *peer) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	// Owned by run; ends with ctx.
	wg.Go(func() { p.grace.Run(ctx) })
	retry := plugin.Backoff{First: 250 * time.Millisecond, Most: 5 * time.Second}
	for tried := 1; ; tried++ {
		servers, err := p.dial(ctx)
		p.grace.Away()
		switch {
		case ctx.Err() != nil:
			return
		case p.begun:
			// The stream worked until now. The immediate retry shows whether
			// this is an outage.
			p.log.Info("the peering stream ended", slog.Any("err", err))
			p.begun, tried = false, 0
			retry.Reset()
			continue
		}
		p.turn++
		if tried < servers && (errors.Is(err, errNotLeader) || grpcstatus.Code(err) == codes.Unavailable) {
			continue // another server may be the leader
		}
		tried = 0
		p.state.set(peeringPart, p.fault(err))
		if !plugin.Pause(ctx, retry.Next(), nil) {
			return
		}
	}
}

// fault converts the error that ended a stream.
func (p *peer) fault(err error) *fault {
	if f, ok := errors.AsType[*fault](err); ok {
		return f
	}
	const again = "; make a new token by consul peering generate-token, and put it in peering.token_file"
	s := grpcstatus.Convert(err)
	switch {
	case errors.Is(err, errNotLeader):
		return &fault{kind: faultServer, err: errors.New("consul has no leader that takes the peering")}
	case s.Code() == codes.PermissionDenied:
		return &fault{kind: faultDenied, err: fmt.Errorf("consul refuses the peering token: %s: it was used before, or there is a newer one%s", s.Message(), again)}
	case s.Code() == codes.InvalidArgument, s.Code() == codes.Aborted:
		return &fault{kind: faultDenied, err: fmt.Errorf("consul does not know the peering: %s%s", s.Message(), again)}
	case s.Code() == codes.Unavailable:
		return &fault{kind: faultUnreachable, err: fmt.Errorf("consul's gRPC port cannot be reached: %s", s.Message())}
	case strings.Contains(s.Message(), "active stream"):
		return &fault{kind: faultLimit, err: fmt.Errorf("consul has a stream of this peering already: %s; give each bridge a peering of its own. "+
			"If it is one that broke off, consul ends it within two minutes", s.Message())}
	default:
		return &fault{kind: faultServer, err: fmt.Errorf("consul's peering stream: %w", err)}
	}
}

// dial opens a stream to one of the servers and follows it to its end. It
// returns the number of servers.
func (p *peer) dial(ctx context.Context) (servers int, err error) {
	files := p.config.Peering
	token, roots, err := files.token()
	if err != nil {
		return 0, &fault{kind: faultDenied, err: err}
	}
	secret, err := files.secret(token)
	if err != nil {
		return 0, &fault{kind: faultDenied, err: err}
	}
	addresses := token.ManualServerAddresses
	if len(addresses) == 0 {
		addresses = slices.Concat(secret.Addresses, token.ServerAddresses)
		slices.Sort(addresses)
		addresses = slices.Compact(addresses)
	}
	address := addresses[p.turn%len(addresses)]
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: roots, ServerName: token.ServerName, MinVersion: tls.VersionTLS12})),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxBody)))
	if err != nil {
		return len(addresses), err
	}
	defer conn.Close() //nolint:errcheck // nothing follows from it

	if secret.Secret == "" {
		// Before the exchange, which is possible only once.
		if err := files.write(nil, false); err != nil {
			return len(addresses), unwritable(err)
		}
		ctx, cancel := context.WithTimeout(ctx, openMost)
		defer cancel()
		var answer consulv1.ExchangeSecretResponse
		if err := conn.Invoke(ctx, methodExchange, &consulv1.ExchangeSecretRequest{
			PeerId: token.PeerID, EstablishmentSecret: token.EstablishmentSecret,
		}, &answer); err != nil {
			return len(addresses), err
		}
		secret = peeringSecret{Token: token.digest(), Secret: answer.StreamSecret}
		if err := files.keep(secret); err != nil {
			return len(addresses), unwritable(err)
		}
	}
	return len(addresses), p.follow(ctx, conn, token, secret)
}

// follow opens a stream, applies its messages until it ends, and returns the
// reason.
func (p *peer) follow(ctx context.Context, conn *grpc.ClientConn, token peeringToken, secret peeringSecret) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, methodStream)
	if err != nil {
		return err
	}
	type received struct {
		*consulv1.ReplicationMessage
		err error
	}
	messages := make(chan received)
	// Owned by follow; ends with the stream, which ends with ctx.
	wg.Go(func() {
		for r := (received{}); r.err == nil; {
			r.ReplicationMessage = &consulv1.ReplicationMessage{}
			r.err = stream.RecvMsg(r.ReplicationMessage)
			select {
			case messages <- r:
			case <-ctx.Done():
				return
			}
		}
	})
	// An error of Send also ends Recv, which returns it.
	send := func(m *consulv1.ReplicationMessage) { _ = stream.SendMsg(m) }
	request := func(url, nonce string) {
		send(&consulv1.ReplicationMessage{Payload: &consulv1.ReplicationMessage_Request{Request: &consulv1.Request{
			PeerId: token.PeerID, ResourceUrl: url, ResponseNonce: nonce,
		}}})
	}
	send(&consulv1.ReplicationMessage{Payload: &consulv1.ReplicationMessage_Open{Open: &consulv1.Open{
		PeerId: token.PeerID, StreamSecretId: secret.Secret, Remote: &consulv1.RemoteInfo{Datacenter: "isthmus"},
	}}})
	for _, url := range []string{urlServices, urlService, urlServers} {
		request(url, "")
	}
	heartbeat := time.NewTicker(heartbeatEvery)
	defer heartbeat.Stop()
	silent := time.NewTimer(openMost)
	defer silent.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-silent.C:
			return &fault{kind: faultUnreachable, err: errors.New("consul was silent for too long on the peering stream")}
		case <-heartbeat.C:
			send(&consulv1.ReplicationMessage{Payload: &consulv1.ReplicationMessage_Heartbeat{Heartbeat: &consulv1.Heartbeat{}}})
		case r := <-messages:
			switch {
			case grpcstatus.Code(r.err) == codes.FailedPrecondition:
				return fmt.Errorf("%w: %w", errNotLeader, r.err)
			case r.err != nil:
				return r.err
			case r.GetTerminated() != nil:
				p.begun = false
				return grpcstatus.Error(codes.Aborted, "it was deleted")
			}
			p.catalog.Heard()
			silent.Reset(silentMost)
			resource := r.GetResponse()
			if resource == nil {
				continue
			}
			servers, err := p.take(resource)
			if err != nil {
				p.begun = false
				return &fault{kind: faultServer, err: fmt.Errorf("consul's peering stream: %w", err)}
			}
			if len(servers) > 0 && !slices.Equal(servers, secret.Addresses) {
				secret.Addresses = servers
				if err := p.config.Peering.keep(secret); err != nil {
					p.log.Warn("peering.secret_file cannot be written", slog.Any("err", err))
				}
			}
			request(resource.ResourceUrl, resource.Nonce)
		}
	}
}

// take applies one resource. If the resource is the list of server addresses,
// it returns them.
func (p *peer) take(r *consulv1.Response) (servers []string, err error) {
	var list consulv1.ExportedServiceList
	var service consulv1.ExportedService
	var addresses consulv1.PeeringServerAddresses
	into, known := map[string]proto.Message{urlServices: &list, urlService: &service, urlServers: &addresses}[r.ResourceUrl]
	if !known {
		return nil, nil
	}
	// Not by type name, which is Consul's.
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(r.Resource.GetValue(), into); err != nil {
		return nil, fmt.Errorf("%s %s: %w", r.ResourceUrl, r.ResourceId, err)
	}
	switch r.ResourceUrl {
	case urlServices:
		p.list(list.Services)
	case urlService:
		p.tell(r.ResourceId, p.convert.instances(entries(service.Nodes)))
	}
	return addresses.Addresses, nil
}

// list applies the list of exported services.
func (p *peer) list(names []string) {
	if len(names) == 0 {
		// Also after the peering or the exporting entry was deleted.
		p.state.set(peeringPart, &fault{kind: faultEmpty, err: errors.New(
			"consul exports no service to this peering, so nothing is removed; write an exported-services entry with the peering as a consumer")})
		return
	}
	p.state.set(peeringPart, nil)
	p.catalog.Detail("over a peering stream, which is experimental: its messages are internal to Consul and may change with any version")
	if !p.begun {
		p.begun, p.services = true, nil
		p.grace.Back()
	}
	sent := p.services
	p.services, p.awaited = make(map[string]bool, len(names)), 0
	var leftOut plugin.Unselected
	for _, name := range names {
		if _, twice := p.services[name]; twice || !leftOut.Match(p.config.Services, name) || !p.wants(registry.Key{Name: name}) {
			continue
		}
		if p.services[name] = sent[name]; !sent[name] {
			p.awaited++
		}
	}
	leftOut.Tell(p.catalog, "services", "")
	p.grace.RemoveOthers(func(key registry.Key) bool {
		_, listed := p.services[key.Name]
		return listed
	})
	p.complete()
}

// tell applies the instances of a service.
func (p *peer) tell(name string, instances []registry.Instance) {
	sent, listed := p.services[name]
	if !listed {
		return
	}
	if !sent {
		p.services[name] = true
		p.awaited--
	}
	key := registry.Key{Name: name}
	if len(instances) == 0 {
		p.grace.Remove(key)
	} else {
		p.grace.Set(registry.Service{Key: key}, instances)
	}
	p.complete()
}

// complete reports a complete listing once every listed service was sent.
func (p *peer) complete() {
	if p.awaited == 0 {
		p.arrived()
	}
}

// entries converts instances to the types of the API.
func entries(nodes []*consulv1.CheckServiceNode) []*api.ServiceEntry {
	out := make([]*api.ServiceEntry, 0, len(nodes))
	for _, n := range nodes {
		node, service := n.GetNode(), n.GetService()
		e := &api.ServiceEntry{
			Node: &api.Node{
				Node: node.GetNode(), Address: node.GetAddress(), TaggedAddresses: node.GetTaggedAddresses(), Meta: node.GetMeta(),
				Locality: place(node.GetLocality()),
			},
			Service: &api.AgentService{
				Kind: api.ServiceKind(service.GetKind()), ID: service.GetId(), Service: service.GetService(), Tags: service.GetTags(), Meta: service.GetMeta(),
				Address: service.GetAddress(), Port: int(service.GetPort()), Locality: place(service.GetLocality()),
				Weights:         api.AgentWeights{Passing: int(service.GetWeights().GetPassing()), Warning: int(service.GetWeights().GetWarning())},
				TaggedAddresses: make(map[string]api.ServiceAddress, len(service.GetTaggedAddresses())),
			},
		}
		for name, a := range service.GetTaggedAddresses() {
			e.Service.TaggedAddresses[name] = api.ServiceAddress{Address: a.GetAddress(), Port: int(a.GetPort())}
		}
		for _, port := range service.GetPorts() {
			e.Service.Ports = append(e.Service.Ports, api.ServicePort{Name: port.GetName(), Port: int(port.GetPort()), Default: port.GetDefault()})
		}
		for _, c := range n.GetChecks() {
			e.Checks = append(e.Checks, &api.HealthCheck{CheckID: c.GetCheckId(), Status: c.GetStatus()})
		}
		if node != nil && service != nil {
			out = append(out, e)
		}
	}
	return out
}

func place(l *consulv1.Locality) *api.Locality {
	return &api.Locality{Region: l.GetRegion(), Zone: l.GetZone()}
}
