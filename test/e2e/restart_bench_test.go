package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
)

// BenchmarkRestart is the time from the start of a bridge whose registry does
// not answer until 1,000,000 instances in 100,000 services are served again:
// until /readyz says so, and until a delta sink has its first resource and all
// of them. One iteration is enough; listing them before takes a minute.
func BenchmarkRestart(b *testing.B) {
	const services, each = 100_000, 10
	const slow = 8 * time.Minute
	bridge := testisthmus.Start(b, fmt.Sprintf("- {name: dc1, type: sim, config: {services: %d, instances: %d, changes_per_second: 0}}\n"+
		"limits: {resources_per_registry: 2000000, bytes_per_registry: 1073741824}\n", services, each))
	testenv.Eventually(b, slow, "the first listing", func() (string, bool) {
		r := bridge.Registry(b, "dc1")
		return fmt.Sprintf("%+v", r), r.Phase == "live"
	})
	listed := float64(time.Now().UnixMilli()) / 1000
	testenv.Eventually(b, slow, "everything to be on disk", func() (string, bool) {
		gauge := func(name string) float64 { return bridge.Metrics(b)[name].GetMetric()[0].GetGauge().GetValue() }
		return fmt.Sprint(gauge("isthmus_state_written_timestamp_seconds")), gauge("isthmus_state_written_timestamp_seconds") > listed
	})
	all := bridge.Registry(b, "dc1")
	for b.Loop() {
		bridge.Kill9()
		ctx, cancel := context.WithTimeout(b.Context(), slow)
		began := time.Now()
		var ready, first, last time.Duration
		var failed error
		var both sync.WaitGroup
		both.Go(func() {
			for ready == 0 && ctx.Err() == nil {
				if code, err := readyz(ctx, bridge.Admin); err == nil && code == http.StatusOK {
					ready = time.Since(began)
				}
				time.Sleep(5 * time.Millisecond)
			}
		})
		both.Go(func() { first, last, failed = receiveAll(ctx, bridge.XDS, all.Services+all.Instances, began) })
		bridge.Restart(b)
		bridge.WaitReady(b)
		cpu := func() float64 {
			return bridge.Metrics(b)["process_cpu_seconds_total"].GetMetric()[0].GetCounter().GetValue()
		}
		spent := cpu()
		// The plugin starts after the state is restored, and would list as much
		// again at once.
		testenv.Eventually(b, slow, "a plugin", func() (string, bool) {
			pid := bridge.Registry(b, "dc1").PID
			return "none", pid > 0 && syscall.Kill(pid, syscall.SIGSTOP) == nil
		})
		both.Wait()
		cancel()
		if failed != nil {
			b.Fatal(failed)
		}
		if r := bridge.Registry(b, "dc1"); r.Phase != "restored" || all.Services != services {
			b.Fatalf("%d services and then %+v", all.Services, r)
		}
		b.ReportMetric(ready.Seconds(), "ready-s")
		b.ReportMetric(first.Seconds(), "first-s")
		b.ReportMetric(last.Seconds(), "all-s")
		b.ReportMetric(bridge.Metrics(b)["isthmus_state_restore_seconds"].GetMetric()[0].GetGauge().GetValue(), "restore-s")
		b.ReportMetric(spent, "ready-cpu-s")
		b.ReportMetric(cpu(), "all-cpu-s")
		b.ReportMetric(0, "ns/op")
		for line := range strings.SplitSeq(bridge.Log(), "\n") {
			if strings.Contains(line, "the last good state was read") {
				b.Log(line)
			}
		}
	}
}

func readyz(ctx context.Context, admin string) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+admin+"/readyz", nil)
	if err != nil {
		return 0, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	return res.StatusCode, res.Body.Close()
}

// rawCodec hands out messages as they are, so that the sink costs little.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(m any) ([]byte, error) { return proto.Marshal(m.(proto.Message)) }

func (rawCodec) Unmarshal(data []byte, m any) error {
	*m.(*[]byte) = append([]byte(nil), data...)
	return nil
}

// receiveAll follows a bridge as a delta sink until it has so many resources.
func receiveAll(ctx context.Context, address string, want int, began time.Time) (first, last time.Duration, err error) {
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1, MaxDelay: 5 * time.Millisecond}}),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{}), grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(1<<30)))
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources")
	if err != nil {
		return 0, 0, err
	}
	node := &core.Node{Id: "restart", Metadata: &structpb.Struct{Fields: map[string]*structpb.Value{"ISTHMUS_SHAPE": structpb.NewStringValue("workload")}}}
	for _, url := range sinkTypes[true] {
		if err := stream.SendMsg(&discovery.DeltaDiscoveryRequest{Node: node, TypeUrl: url}); err != nil {
			return 0, 0, err
		}
	}
	for have := 0; have < want; {
		var m []byte
		if err := stream.RecvMsg(&m); err != nil {
			return 0, 0, err
		}
		n, url, nonce, err := scanDelta(m)
		if err != nil {
			return 0, 0, err
		}
		if have += n; have > 0 && first == 0 {
			first = time.Since(began)
		}
		if err := stream.SendMsg(&discovery.DeltaDiscoveryRequest{TypeUrl: url, ResponseNonce: nonce}); err != nil {
			return 0, 0, err
		}
	}
	return first, time.Since(began), nil
}

// scanDelta counts the resources of an encoded DeltaDiscoveryResponse.
func scanDelta(m []byte) (resources int, url, nonce string, err error) {
	for len(m) > 0 {
		number, kind, n := protowire.ConsumeTag(m)
		if n < 0 || kind != protowire.BytesType {
			return 0, "", "", errors.New("not a DeltaDiscoveryResponse")
		}
		value, size := protowire.ConsumeBytes(m[n:])
		if size < 0 {
			return 0, "", "", protowire.ParseError(size)
		}
		switch number {
		case 2:
			resources++
		case 4:
			url = string(value)
		case 5:
			nonce = string(value)
		}
		m = m[n+size:]
	}
	return resources, url, nonce, nil
}
