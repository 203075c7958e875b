// Package nacosapp is an application that registers with Nacos.
package nacosapp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	grpcapi "github.com/nacos-group/nacos-sdk-go/v2/api/grpc"
	"github.com/nacos-group/nacos-sdk-go/v2/common/remote/rpc/rpc_request"
	"github.com/nacos-group/nacos-sdk-go/v2/common/remote/rpc/rpc_response"
	"github.com/nacos-group/nacos-sdk-go/v2/model"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/anypb"
)

// Client is a connection of an application. Its registrations last as long as
// the connection. Its methods may be called from any goroutine.
type Client struct {
	cc     *grpc.ClientConn
	client grpcapi.RequestClient
	token  func() (string, error)
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu     sync.Mutex // guards onPush, and the order of what is sent on the stream
	onPush func(model.Service)
}

// Dial connects to the gRPC address of a server; ctx bounds only that. With
// access control token returns what a login has returned; nil means that there
// is none.
func Dial(ctx context.Context, addr string, token func() (string, error)) (_ *Client, err error) {
	cc, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return nil, err
	}
	life, cancel := context.WithCancel(context.Background())
	c := &Client{cc: cc, client: grpcapi.NewRequestClient(cc), token: token, cancel: cancel}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	if err := c.call(ctx, rpc_request.NewServerCheckRequest(), &rpc_response.ServerCheckResponse{}); err != nil {
		return nil, err
	}
	stream, err := grpcapi.NewBiRequestStreamClient(cc).RequestBiStream(life)
	if err != nil {
		return nil, err
	}
	setup := rpc_request.NewConnectionSetupRequest()
	setup.ClientVersion = "Nacos-Go-Client:v2.3.5"
	setup.Labels = map[string]string{"source": "sdk", "module": "naming"}
	if err := stream.Send(c.payload(setup)); err != nil {
		return nil, err
	}
	// Owned by the client; ends with the stream, which Close ends.
	c.done.Go(func() { c.receive(stream) })
	// The naming service learns of the connection later than the rest of the
	// server, and does not answer queries before.
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for known := false; ; {
		err := c.call(ctx, rpc_request.NewHealthCheckRequest(), &rpc_response.HealthCheckResponse{})
		if known && err == nil {
			break
		}
		known = err == nil
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, err
		}
	}
	// Owned by the client; ends with Close.
	c.done.Go(func() { c.keepHealthy(life) })
	return c, nil
}

// Close ends the connection and its registrations.
func (c *Client) Close() {
	c.cancel()
	c.cc.Close()
	c.done.Wait()
}

func (c *Client) payload(r rpc_request.IRequest) *grpcapi.Payload {
	body, err := json.Marshal(r)
	if err != nil {
		panic(fmt.Sprintf("BUG: %v", err))
	}
	headers := map[string]string{}
	if c.token != nil {
		if token, err := c.token(); err == nil && token != "" { // without one the server says why
			headers["accessToken"] = token
		}
	}
	return &grpcapi.Payload{Metadata: &grpcapi.Metadata{Type: r.GetRequestType(), Headers: headers}, Body: &anypb.Any{Value: body}}
}

// receive acknowledges the server's requests on the stream.
func (c *Client) receive(stream grpcapi.BiRequestStream_RequestBiStreamClient) {
	for {
		p, err := stream.Recv()
		if err != nil {
			return
		}
		var r struct {
			RequestID   string        `json:"requestId"`
			ServiceInfo model.Service `json:"serviceInfo"`
		}
		_ = json.Unmarshal(p.GetBody().GetValue(), &r)
		if p.GetMetadata().GetType() == "NotifySubscriberRequest" {
			c.mu.Lock()
			push := c.onPush
			c.mu.Unlock()
			if push != nil {
				push(r.ServiceInfo)
			}
		}
		body, _ := json.Marshal(rpc_response.Response{ResultCode: 200, Success: true, RequestId: r.RequestID})
		ack := &grpcapi.Payload{
			Metadata: &grpcapi.Metadata{Type: strings.TrimSuffix(p.GetMetadata().GetType(), "Request") + "Response"},
			Body:     &anypb.Any{Value: body},
		}
		if stream.Send(ack) != nil {
			return
		}
	}
}

func (c *Client) keepHealthy(ctx context.Context) {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			bounded, cancel := context.WithTimeout(ctx, 3*time.Second)
			_ = c.call(bounded, rpc_request.NewHealthCheckRequest(), &rpc_response.HealthCheckResponse{}) // the next call says
			cancel()
		case <-ctx.Done():
			return
		}
	}
}

func (c *Client) call(ctx context.Context, r rpc_request.IRequest, into rpc_response.IResponse) error {
	p, err := c.client.Request(ctx, c.payload(r))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(p.GetBody().GetValue(), into); err != nil {
		return err
	}
	if into.GetResultCode() != 200 {
		return errors.New(string(p.GetBody().GetValue()))
	}
	return nil
}

// Register replaces the client's instances of the service. Without instances it
// deregisters all.
func (c *Client) Register(ctx context.Context, namespace, group, name string, instances ...model.Instance) error {
	if len(instances) == 0 {
		r := rpc_request.NewInstanceRequest(namespace, name, group, "deregisterInstance", model.Instance{Ip: "127.0.0.1", Port: 1, Ephemeral: true, ClusterName: "DEFAULT"})
		return c.call(ctx, r, &rpc_response.InstanceResponse{})
	}
	r := rpc_request.NewBatchInstanceRequest(namespace, name, group, "batchRegisterInstance", instances)
	return c.call(ctx, r, &rpc_response.BatchInstanceResponse{})
}

// OnPush sets the function that receives the pushes of all subscribed services.
func (c *Client) OnPush(onPush func(model.Service)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.onPush = onPush
}

// Subscribe subscribes to a service.
func (c *Client) Subscribe(ctx context.Context, namespace, group, name string) error {
	r := rpc_request.NewSubscribeServiceRequest(namespace, name, group, "", true)
	return c.call(ctx, r, &rpc_response.SubscribeServiceResponse{})
}
