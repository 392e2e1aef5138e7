// sandboxes ENDPOINT wait|remove: waits until a container runtime answers; or stops and removes every
// Pod's sandbox that it has, containers and network included.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: sandboxes unix:///path.sock wait|remove")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	conn, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	runtime := cri.NewRuntimeServiceClient(conn)
	switch os.Args[2] {
	case "wait":
		wait(ctx, runtime)
	case "remove":
		remove(ctx, runtime)
	default:
		log.Fatal("neither wait nor remove: ", os.Args[2])
	}
}

func wait(ctx context.Context, runtime cri.RuntimeServiceClient) {
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		version, err := runtime.Version(ctx, &cri.VersionRequest{})
		if err == nil {
			fmt.Println(version.RuntimeName, version.RuntimeVersion)
			return
		}
		if time.Now().After(end) {
			log.Fatal(err)
		}
	}
}

func remove(ctx context.Context, runtime cri.RuntimeServiceClient) {
	list, err := runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		log.Fatal(err)
	}
	failed := false
	for _, sandbox := range list.Items {
		fmt.Println(sandbox.Metadata.Namespace+"/"+sandbox.Metadata.Name, sandbox.State)
		_, err := runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: sandbox.Id})
		if err == nil {
			_, err = runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: sandbox.Id})
		}
		if err != nil {
			log.Print(err)
			failed = true
		}
	}
	if failed {
		os.Exit(1)
	}
}
