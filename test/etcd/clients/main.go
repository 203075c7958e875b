// Command clients registers an instance in etcd with the libraries that
// programs use, so that what they write is what the adapter reads:
//
//	clients KIND ENDPOINT SERVICE ID ADDRESS
//
// KIND is kratos, go-micro or grpc. It prints "registered", keeps the instance
// alive until its standard input ends, and then deregisters it.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	kratosetcd "github.com/go-kratos/kratos/contrib/registry/etcd/v2"
	kratos "github.com/go-kratos/kratos/v2/registry"
	microetcd "github.com/go-micro/plugins/v4/registry/etcd"
	micro "go-micro.dev/v4/registry"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/naming/endpoints"
)

func main() {
	if len(os.Args) != 6 {
		fmt.Fprintln(os.Stderr, "usage: clients KIND ENDPOINT SERVICE ID ADDRESS")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// ttl is how long a lease counts.
const ttl = 10 * time.Second

func run(kind, endpoint, service, id, address string) error {
	register := map[string]func(ctx context.Context, client *clientv3.Client, endpoint, service, id, address string) (func() error, error){
		"kratos": asKratos, "go-micro": asMicro, "grpc": asGRPC,
	}[kind]
	if register == nil {
		return fmt.Errorf("no such kind: %s", kind)
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialTimeout: time.Minute})
	if err != nil {
		return err
	}
	defer client.Close()
	deregister, err := register(context.Background(), client, endpoint, service, id, address)
	if err != nil {
		return err
	}
	fmt.Println("registered")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	return deregister()
}

func asKratos(ctx context.Context, client *clientv3.Client, _, service, id, address string) (func() error, error) {
	r := kratosetcd.New(client, kratosetcd.RegisterTTL(ttl))
	instance := &kratos.ServiceInstance{
		ID: id, Name: service, Version: "v1", Metadata: map[string]string{"zone": "a"},
		Endpoints: []string{"grpc://" + address + "?isSecure=false"},
	}
	return func() error { return r.Deregister(ctx, instance) }, r.Register(ctx, instance)
}

func asMicro(_ context.Context, _ *clientv3.Client, endpoint, service, id, address string) (func() error, error) {
	// It takes addresses without a scheme.
	r := microetcd.NewRegistry(micro.Addrs(endpoint[len("http://"):]))
	instance := &micro.Service{
		Name: service, Version: "v1", Metadata: map[string]string{"team": "x"},
		Endpoints: []*micro.Endpoint{{Name: "Greeter.Hello", Request: &micro.Value{Name: "Request", Type: "Request"}}},
		Nodes:     []*micro.Node{{Id: id, Address: address, Metadata: map[string]string{"protocol": "grpc", "registry": "etcd"}}},
	}
	return func() error { return r.Deregister(instance) }, r.Register(instance, micro.RegisterTTL(ttl))
}

func asGRPC(ctx context.Context, client *clientv3.Client, _, service, id, address string) (func() error, error) {
	manager, err := endpoints.NewManager(client, service)
	if err != nil {
		return nil, err
	}
	lease, err := client.Grant(ctx, int64(ttl.Seconds()))
	if err != nil {
		return nil, err
	}
	if _, err := client.KeepAlive(ctx, lease.ID); err != nil {
		return nil, err
	}
	key := service + "/" + id
	return func() error { return manager.DeleteEndpoint(ctx, key) },
		manager.AddEndpoint(ctx, key, endpoints.Endpoint{Addr: address, Metadata: map[string]any{"version": "v1", "weight": 3}}, clientv3.WithLease(lease.ID))
}
